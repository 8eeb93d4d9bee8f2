#!/usr/bin/env bash
# Installs a wheel as its users do, outside of the checkout, and measures the base install.
# Needs a package index, uv, and pipx (or uv's own: uvx pipx).
#   scripts/try_wheel.sh dist/lmeval_dispersion-1.0.0rc1-py3-none-any.whl
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
pipx=(pipx); command -v pipx > /dev/null || pipx=(uvx pipx)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cd "$work"

says() { grep -q "$1" || { echo "expected \"$1\" in the output of: $2" >&2; exit 1; }; echo "ok: $2"; }
uvx --from "$wheel" screen-checkpoints --demo | says "^Evaluate first: sums-80" "uvx --from WHEEL screen-checkpoints --demo"
"${pipx[@]}" run --spec "$wheel" screen-checkpoints --demo | says "^Evaluate first: sums-80" "pipx run --spec WHEEL screen-checkpoints --demo"
uvx --from "$wheel" --with "$wheel" dispersion --help | says "usage: dispersion" "uvx --from WHEEL dispersion --help"

# `hf dispersion`, the extension of the `hf` command.
uv build --quiet --wheel --out-dir "$work/hf" "$here/packaging/hf-dispersion"
uvx --from "$(ls "$work"/hf/*.whl)" --with "$wheel" hf-dispersion --demo | says "^Evaluate first: sums-80" "hf-dispersion --demo"

# The packages are in the cache by now: what remains is the installation.
for try in 1 2 3; do
  begin=$(date +%s%N)
  uv venv --quiet "base$try" && uv pip install --quiet --link-mode copy --python "base$try" "$wheel"
  seconds[try]=$((($(date +%s%N) - begin) / 1000000))
done
megabytes=$(du -sm base1 | cut -f1)
echo "base install: $megabytes MB; ${seconds[1]}, ${seconds[2]} and ${seconds[3]} ms with a warm cache"
[ "$megabytes" -lt 150 ] || { echo "expected less than 150 MB" >&2; exit 1; }
