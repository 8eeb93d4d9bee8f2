"""Trackers that the suite does not install, offline: what they keep of a watched run beside its JSONL.

    pip install wandb trackio
    python benchmarks/trackers.py wandb trackio

Trains the demo model for six steps with each, reads the tracker's own files back, and fails where a value
differs. TensorBoard and MLflow are in tests/watching/test_trackers.py, whose run this is.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent.parent / folder) for folder in (".", "screener", "tests/watching")]


def wandb_records(data):
    """Records of an offline run: LevelDB's log format behind a header of seven bytes."""
    place, part, block = 7, b"", 32_768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += 7
        part += data[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last piece
            yield part
            part = b""


def wandb_values(folder):
    """Name -> step -> value of the one offline run of W&B in a folder."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    found = {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        values = {
            "/".join([*([item.key] if item.key else []), *item.nested_key]): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in values.items():
            found.setdefault(name, {})[values.get("train/global_step")] = value
    return found


def trackio_values(folder):
    """Name -> step -> value of the one local run of trackio."""
    from trackio.sqlite_storage import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    found = {}
    for entry in SQLiteStorage.get_logs(project, run):
        for name, value in entry.items():
            found.setdefault(name, {})[entry.get("train/global_step")] = value
    return found


READ = {"wandb": wandb_values, "trackio": trackio_values}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trackers", nargs="+", choices=READ)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        from test_trackers import watched

        (args.train / "expected.json").write_text(json.dumps(watched(args.train, args.trackers[0])))
        return
    for tracker in args.trackers:
        with tempfile.TemporaryDirectory() as temporary:
            compare(tracker, Path(temporary))


def compare(tracker, folder):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    # W&B writes the last of its file when the process ends.
    command = [sys.executable, "-W", "ignore", str(HERE), tracker, "--train", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    expected = json.loads((folder / "expected.json").read_text())
    found, worst = READ[tracker](folder), 0.0
    for name, told in expected.items():
        steps = {int(step): value for step, value in told.items()}
        kept = found.get(f"train/{name}", {})
        if set(kept) != set(steps):
            raise SystemExit(f"{tracker}: {name} at steps {sorted(kept)}, expected {sorted(steps)}")
        worst = max(worst, *(abs(kept[step] - value) for step, value in steps.items()))
    print(f"{tracker}: {len(expected)} numbers at steps {sorted(steps)}, at most {worst:.1e} apart")
    if worst > 1e-12:
        raise SystemExit(f"{tracker} keeps other values than the JSONL")


if __name__ == "__main__":
    main()
