"""Make `lmeval_dispersion/data/demo_run`, which `dispersion audit --demo` reads, from `examples/mmlu_after`.

    python scripts/demo_run.py

Seventeen questions of each of the twelve subjects, evenly spaced: 204 of 1,739.
"""

from pathlib import Path

import numpy as np

from lmeval_dispersion.store import read_store, write_store

ROOT = Path(__file__).parents[1]
EACH = 17


def main() -> None:
    run = read_store(ROOT / "examples" / "mmlu_after")
    places = run.documents.reset_index(drop=True).groupby("subject", sort=True).indices.values()
    rows = np.sort(np.concatenate([p[np.linspace(0, len(p) - 1, EACH).astype(int)] for p in places]))
    vectors = run.vectors("last")[rows] * run.norms("last")[rows, None]
    made = ("format", "complete", "n", "layers", "width", "sha256")
    write_store(
        ROOT / "lmeval_dispersion" / "data" / "demo_run",
        documents=run.documents.iloc[rows],
        vectors={"last": vectors},
        manifest={key: value for key, value in run.manifest.items() if key not in made},
    )


if __name__ == "__main__":
    main()
