"""Continuous batching gives what `generate` gives, row by row, however rows come and go."""

import pytest
import torch

from hf_domino.training import generate
from hf_domino.training.generate import Generator, Request, common_prefix
from hf_domino.training.slots import SlotMemory, slot_attention
from tests.tiny import plain_text, prompt_ids, tiny_target

STATES = [1, 3]


def requests(count: int, shared: list[int] | None = None) -> list[Request]:
    prompts = [(shared or []) + prompt_ids(2 + i % 5, seed=i)[0].tolist() for i in range(count)]
    return [Request(prompt, 0.0, i) for i, prompt in enumerate(prompts)]


def answers(generator: Generator, wanted: list[Request], **arguments):
    return {answer.request.key: answer for answer in generator.run(iter(wanted), **arguments)}


@pytest.mark.parametrize("family", ["llama", "qwen3_tied", "gemma3"])
@pytest.mark.parametrize("refill", [1, 4])
def test_greedy_answers_equal_generate(family, refill):
    window = {"sliding_window": 64} if family == "gemma3" else {}
    target = tiny_target(family, context=0.7, **window)
    wanted = requests(13)
    # Four tokens end a text here, so that rows finish at many different steps.
    generator = Generator(target, 5, 14, 40, stop_ids=[11, 23, 37, 51], taps=STATES, refill=refill)
    found = answers(generator, wanted)
    assert sorted(found) == list(range(13))
    lengths = set()
    for request in wanted:
        text = plain_text(target, torch.tensor([request.prompt]), max_new_tokens=14, eos_token_id=[11, 23, 37, 51])
        answer = found[request.key]
        assert request.prompt + answer.tokens == text[0].tolist()
        assert answer.finished == (answer.tokens[-1] in (11, 23, 37, 51))
        lengths.add(len(answer.tokens))
        states = target(text[:, :-1], output_hidden_states=True).hidden_states
        expected = torch.cat([states[i][0] for i in STATES], -1)
        torch.testing.assert_close(answer.states.float(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert len(lengths) > 3, "rows finished at different times"


def test_a_shared_beginning_is_computed_once_and_changes_nothing():
    target = tiny_target(context=0.7)
    wanted = requests(9, shared=[7, 8, 9, 10])
    wanted[6] = Request(prompt_ids(4, seed=50)[0].tolist(), 0.0, 6)  # beyond the first batch: begins otherwise
    with_prefix = answers(Generator(target, 4, 8, 40, taps=STATES), wanted)
    without = answers(Generator(target, 4, 8, 40, taps=STATES), wanted, prefix=[])
    for key, answer in with_prefix.items():
        assert answer.tokens == without[key].tokens
        torch.testing.assert_close(answer.states, without[key].states, rtol=2e-2, atol=2e-2)


def test_common_prefix_leaves_a_token_to_feed():
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2, 3, 4]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2]]) == [1]
    assert common_prefix([]) == []


def test_limits():
    target = tiny_target()
    generator = Generator(target, 2, max_new_tokens=50, max_length=12, stop_ids=[])
    found = answers(generator, [Request([5] * 4, 0.0, "a"), Request([6] * 11, 0.0, "b")])
    assert {key: len(answer.tokens) for key, answer in found.items()} == {"a": 8, "b": 1}
    assert not found["a"].finished
    with pytest.raises(ValueError, match="no room"):
        answers(generator, [Request([5] * 12)])


def test_sampling_follows_the_temperature():
    target = tiny_target(context=0.3)
    prompt = prompt_ids(4)[0].tolist()
    probabilities = torch.softmax(target(torch.tensor([prompt])).logits[0, -1] / 0.9, -1)
    generator = Generator(target, 50, max_new_tokens=1, max_length=20, stop_ids=[])
    drawn = [a.tokens[0] for a in generator.run(Request(prompt, 0.9) for _ in range(2000))]
    counts = torch.bincount(torch.tensor(drawn), minlength=probabilities.numel()).float()
    likely = probabilities > 0.005
    error = (counts / 2000 - probabilities)[likely].abs()
    assert (error < 4.5 * (probabilities[likely] / 2000).sqrt()).all()


def test_the_source_may_run_dry_and_give_more():
    target = tiny_target()

    class Turns:
        """The second turn is known only when the first is answered."""

        def __init__(self):
            self.waiting = [Request([5, 6], 0.0, 1)]

        def __iter__(self):
            return self

        def __next__(self):
            if not self.waiting:
                raise StopIteration
            return self.waiting.pop()

    source, keys = Turns(), []
    for answer in Generator(target, 3, 4, 40, stop_ids=[]).run(source):
        keys.append(answer.request.key)
        if answer.request.key < 3:
            source.waiting.append(Request(answer.request.prompt + answer.tokens, 0.0, answer.request.key + 1))
    assert keys == [1, 2, 3]


def test_the_model_s_attention_is_put_back():
    target = tiny_target()
    before = target.config._attn_implementation
    answers(Generator(target, 2, 3, 20), requests(2))
    assert target.config._attn_implementation == before


def test_the_model_is_packed_during_its_forwards_and_not_between_answers(monkeypatch):
    packed: list[bool] = []

    class Packed:
        entered = False

        def __enter__(self):
            self.entered = True

        def __exit__(self, *error):
            self.entered = False

    context, target = Packed(), tiny_target()
    monkeypatch.setattr(generate, "packed_rows", lambda model: context)
    target.register_forward_pre_hook(lambda *_: packed.append(context.entered))
    for _ in Generator(target, 2, 3, 20).run(requests(4, shared=[5, 6, 7])):
        assert not context.entered
    assert len(packed) > 4 and all(packed)


def test_a_bfloat16_target_attends_in_float32_on_cpus():
    query, keys, values = (torch.randn(3, n, 1, 8).bfloat16() for n in (4, 2, 2))
    earlier = [(torch.randn(3, 2, 5, 8).bfloat16(), torch.randn(3, 2, 5, 8).bfloat16())]
    memory = SlotMemory(3, 9)
    memory.fill([0, 1, 2], earlier, [5, 2, 4])
    mask = memory.mask(torch.bfloat16, query.device)
    found, _ = slot_attention(torch.nn.Identity(), query, *memory.update(keys, values, 0), mask)
    assert memory.update(keys, values, 0)[0].dtype == torch.float32 and found.dtype == torch.bfloat16
    for row, length in enumerate([5, 2, 4]):
        k, v = (
            torch.cat([old[row, :, :length], new[row]], dim=1).float().repeat_interleave(2, dim=0)
            for old, new in zip(earlier[0], (keys, values), strict=True)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(query[row].float(), k, v)
        torch.testing.assert_close(found[row, 0].float(), expected[:, 0], rtol=1e-2, atol=1e-2)


def test_windows_shorter_than_the_text_are_refused():
    with pytest.raises(ValueError, match="whole context"):
        Generator(tiny_target("mistral_sliding"), 2, 8, max_length=40)
