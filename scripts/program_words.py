"""Says which words of the reference sets are words of Python, the shell, CSS or another language.

    python scripts/program_words.py [SET …]     # default: reference

Searched are Python's standard library (modules, and the public names of each module and class), the
commands of POSIX, GNU coreutils and common packages, git's, and what Pygments colours as a keyword, a
built-in name, or a property, value or colour of CSS.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from functools import cache

from lmeval_screener.tokens.sets import load_token_set
from pygments.lexers import get_lexer_by_name
from pygments.token import Keyword, Name, Operator

#: POSIX.1-2017, Shell and Utilities.
POSIX = """
admin alias ar asa at awk basename batch bc bg c99 cal cat cd cflow chgrp chmod chown cksum cmp
comm command compress cp crontab csplit ctags cut cxref date dd delta df diff dirname du echo ed
env ex expand expr false fc fg file find fold fort77 fuser gencat get getconf getopts grep hash
head iconv id ipcrm ipcs jobs join kill lex link ln locale localedef logger logname lp ls m4
mailx make man mesg mkdir mkfifo more mv newgrp nice nl nm nohup od paste patch pathchk pax pr
printf prs ps pwd read renice rm rmdel rmdir sact sccs sed sh sleep sort split strings strip
stty tabs tail talk tee test time touch tput tr true tsort tty type ulimit umask unalias uname
uncompress unexpand unget uniq unlink uucp uudecode uuencode uustat uux val vi wait wc what who
write xargs yacc zcat
"""
#: GNU coreutils beside them.
COREUTILS = """
arch base32 base64 chcon chroot dir dircolors factor fmt groups hostid hostname install md5sum
mktemp mknod nproc numfmt pinky printenv ptx readlink realpath runcon seq shred shuf stat stdbuf
sum sync tac timeout truncate tsort uptime users vdir whoami yes
"""
#: What else the user of a shell types.
USUAL = """
bash clear curl docker emacs finger fish free gcc gdb git gzip history host kubectl last less
locate look mail mount nano node nose npm parallel perl ping pip python reset rev ruby screen
script ssh su sudo tar tmux top tree unzip vim watch wget whatis where whereis whois zip zsh
"""
#: The commands of git.
GIT = """
add apply bisect blame branch bundle checkout clean clone commit config describe fetch gc init
log maintenance merge notes pull push rebase reflog remote rerere restore revert show stash
status submodule switch tag worktree
"""
COMMANDS = frozenset(f"{POSIX} {COREUTILS} {USUAL} {GIT}".split())
LANGUAGES = (
    *(
        "bash",
        "batch",
        "c",
        "common-lisp",
        "cpp",
        "csharp",
        "css",
        "docker",
        "fish",
        "go",
        "haskell",
    ),
    *("html", "java", "javascript", "julia", "kotlin", "llvm", "make", "matlab", "mysql", "nasm"),
    *("perl", "php", "postgresql", "powershell", "python", "r", "ruby", "rust", "scheme", "sql"),
    *("swift", "typescript"),
)
OF_PROGRAMS = (Keyword, Name.Builtin, Operator.Word)
STYLES = ("a {{ {}: x }}", "a {{ color: {} }}", "a:{} {{ }}")  # property, value, pseudo-class
#: Modules that open a window or a page, print, or hold tests.
UNREAD = {"__main__", "antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle"}


def main(names: list[str]) -> int:
    """Print the words, one a line with where each was found; 1 if there are any."""
    words = {item for name in names for item in items(name)}
    places = {word: places_of(word) for word in sorted(words)}
    lines = [f"{word}: {', '.join(found)}" for word, found in places.items() if found]
    print("\n".join(lines) or "none")
    return int(bool(lines))


def items(name: str) -> list[str]:
    """The words of a reference set's default groups."""
    return [
        item for group in load_token_set(name, "reference").groups.values() for item in group.items
    ]


def places_of(word: str) -> list[str]:
    """Where a word means something in programs."""
    places = []
    if word in COMMANDS:
        places.append("a command")
    if word in library():
        places.append(library()[word])
    for language in LANGUAGES:
        texts = [style.format(word) for style in STYLES] if language == "css" else [word]
        if any(is_of_programs(word, text, language) for text in texts):
            places.append(language)
    return places


def is_of_programs(word: str, text: str, language: str) -> bool:
    """Whether Pygments colours the word in a text as a word of the language itself."""
    return any(
        value.strip() == word and any(kind in of_programs for of_programs in OF_PROGRAMS)
        for kind, value in get_lexer_by_name(language).get_tokens(text)
    )


@cache
def library() -> dict[str, str]:
    """Public names of Python's standard library, each with the first place that has it."""
    names: dict[str, str] = {}
    for module in sorted(sys.stdlib_module_names - UNREAD):
        if module.startswith("_"):
            continue
        names.setdefault(module, module)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = vars(importlib.import_module(module))
        except ImportError:  # of another system, or built without
            continue
        for name, value in list(content.items()):
            if name.startswith("_"):
                continue
            names.setdefault(name, f"{module}.{name}")
            if inspect.isclass(value):
                for attribute in vars(value):
                    names.setdefault(attribute, f"{module}.{name}.{attribute}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["reference"]))
