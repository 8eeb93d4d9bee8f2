"""Parameter counts of real checkpoints get the names that the field uses."""

from __future__ import annotations

import pytest
from lmeval_screener.ranking import scale_name


@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary", "width", "tied"),
    [
        # stored parameters, rows and width as their configurations give them
        ("0.5B", 494_032_768, 151936, 896, True),  # Qwen2.5-0.5B
        ("1.5B", 1_543_714_304, 151936, 1536, True),  # Qwen2.5-1.5B
        ("1.5B", 1_777_088_000, 151936, 1536, False),  # R1-Distill-Qwen-1.5B
        ("3B", 3_085_938_688, 151936, 2048, True),  # Qwen2.5-3B
        ("7B", 7_615_616_512, 152064, 3584, False),  # Qwen2.5-7B
        ("14B", 14_770_033_664, 152064, 5120, False),  # Qwen2.5-14B
        ("32B", 32_763_876_352, 152064, 5120, False),  # Qwen2.5-32B
        ("72B", 72_706_203_648, 152064, 8192, False),  # Qwen2.5-72B
        ("7B", 6_738_415_616, 32000, 4096, False),  # Llama-2-7b
        ("13B", 13_015_864_320, 32000, 5120, False),  # Llama-2-13b
        ("8B", 8_030_261_248, 128256, 4096, False),  # Llama-3.1-8B
        ("70B", 70_553_706_496, 128256, 8192, False),  # Llama-3.1-70B
        ("1.7B", 1_711_376_384, 49152, 2048, True),  # SmolLM2-1.7B
        ("120M", 124_439_808, 50257, 768, True),  # gpt2
    ],
)
def test_names_of_real_checkpoints(name, parameters, vocabulary, width, tied):
    assert scale_name(parameters, 0 if tied else vocabulary * width) == name


def test_without_a_count_the_scale_is_unknown():
    assert scale_name(None) == "unknown"
    assert scale_name(100, 1000) == "unknown"


def test_padding_a_vocabulary_changes_no_name():
    assert scale_name(1_543_714_304 + 128 * 1536) == "1.5B"
