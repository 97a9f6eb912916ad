"""Nothing is left behind: in the target's cache, in a batch's slots, in the process."""

import gc

import pytest
import torch

from hf_domino.drafter import decoding_domino
from tests.contract.pairs import pair
from tests.tiny import PAD, prompt_ids


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_64_rounds_the_cache_holds_what_a_chains_does(family, happened, monkeypatch):
    target, drafter = pair(family)
    monkeypatch.setattr(drafter.config, "max_tree_nodes", 30)
    arguments = dict(
        max_new_tokens=200,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
        repetition_penalty=2.0,
        return_dict_in_generate=True,
    )
    tree = target.generate(prompt_ids(5), assistant_model=drafter, **arguments)
    rounds = happened["rounds"]
    monkeypatch.setattr(drafter, "use_tree", False)
    chain = target.generate(prompt_ids(5), assistant_model=drafter, **arguments)
    assert rounds >= 64 and happened["moves"] and happened["calls"] == 1
    sizes = [[tuple(layer.keys.shape) for layer in result.cache.layers] for result in (tree, chain)]
    assert torch.equal(tree.sequences, chain.sequences) and sizes[0] == sizes[1]


def test_a_batch_of_very_different_lengths_stays_within_1_3_of_plain(happened, monkeypatch):
    target, drafter = pair("llama")
    monkeypatch.setattr(drafter.config, "max_tree_nodes", 4)
    ids, mask = prompt_ids(40, 3, batch=8), torch.ones(8, 40, dtype=torch.long)
    for row in range(8):
        mask[row, : 5 * row] = 0
    longest_text, slots = [0], []
    original = decoding_domino.compact

    def compact(cache, slot_positions, *args):
        result = original(cache, slot_positions, *args)
        assert cache.layers[0].keys.shape[2] == result.shape[1]
        longest_text[0] = max(longest_text[0], int(slot_positions.max()) + 1)
        # Plain generation holds the whole batch's prompt and text, padding and finished sequences included.
        slots.append((result.shape[0] * result.shape[1], 8 * longest_text[0]))
        return result

    monkeypatch.setattr(decoding_domino, "compact", compact)
    target.generate(
        ids * mask,
        attention_mask=mask,
        assistant_model=drafter,
        max_new_tokens=150,
        do_sample=False,
        eos_token_id=[5, 9],
        pad_token_id=PAD,
    )
    assert len(slots) > 15 and happened["accepted"]
    assert all(mine <= 1.3 * plain for mine, plain in slots), max(mine / plain for mine, plain in slots)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")  # looking at all objects asks for it
def test_200_calls_of_mixed_shapes_leave_memory_flat():
    target, drafter = pair("llama")

    def calls(count):
        for i in range(count):
            target.generate(
                prompt_ids(1 + i % 7, i, batch=1 + i % 3), assistant_model=drafter, max_new_tokens=1 + i % 9,
                do_sample=bool(i % 2), pad_token_id=PAD, eos_token_id=[1, 5], return_dict_in_generate=i % 5 == 0,
            )  # fmt: skip
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(isinstance(item, torch.Tensor) for item in objects)

    objects, tensors = calls(30)
    later_objects, later_tensors = calls(200)
    assert later_tensors <= tensors
    assert later_objects - objects < 200  # less than one object a call: counters and times, no state
