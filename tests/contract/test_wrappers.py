"""Targets and drafters in wrappers, pipelines, threads and calls that were broken off."""

import threading

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from hf_domino.drafter import packing_domino
from tests.contract.pairs import assert_same, outcome, pair, tiny_tokenizer
from tests.tiny import PAD, prompt_ids, skilled_drafter, tiny_target

GREEDY = dict(do_sample=False, pad_token_id=PAD, eos_token_id=None, max_new_tokens=14)


def _own_pair():
    """Not the shared one: wrappers change it."""
    target = tiny_target(context=0.3, num_hidden_layers=2)
    drafter = skilled_drafter(target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return target, drafter


@pytest.mark.parametrize("do_sample", [False, True])
def test_lora_on_both_sides(do_sample, happened):
    target, drafter = _own_pair()
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = get_peft_model(target, lora).eval()
    drafter = get_peft_model(drafter, lora)
    arguments = GREEDY | {"do_sample": do_sample, "input_ids": prompt_ids(5)}
    plain, drafted = (outcome(target, None, **arguments, **extra) for extra in ({}, {"assistant_model": drafter}))
    assert_same(drafted.result, plain.result)
    assert torch.equal(drafted.random_state, plain.random_state) and happened["rounds"]


def test_an_adapter_merged_between_calls(monkeypatch, happened):
    """PEFT changes weights through `.data`, which torch does not count."""
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: True)
    monkeypatch.setattr(packing_domino, "_SMALLEST", 1)
    target, drafter = _own_pair()
    for parameter in (*target.parameters(), *drafter.parameters()):
        parameter.data = parameter.data.bfloat16().float()  # what packing holds exactly
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    target, drafter = get_peft_model(target, lora).eval(), get_peft_model(drafter, lora)
    arguments = GREEDY | {"input_ids": prompt_ids(5)}
    plain = target.generate(**arguments)
    for change in (lambda model: None, lambda model: model.merge_adapter(), lambda model: model.unmerge_adapter()):
        change(target)
        change(drafter)
        assert_same(target.generate(**arguments, assistant_model=drafter), plain)
    assert happened["calls"] == 3 and happened["accepted"]


@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")  # PEFT passes the former
@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_learned_prompts_are_served_without_drafts(config, happened):
    """Their virtual tokens lie in the cache and not in the text."""
    target, drafter = _own_pair()
    target = get_peft_model(target, config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    ids = prompt_ids(5)
    arguments = GREEDY | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_same(target.generate(**arguments, assistant_model=drafter), target.generate(**arguments))
    assert not happened["calls"]


@pytest.mark.parametrize("given", ["drafter", "path"])
def test_pipelines(given, tmp_path, happened):
    target, drafter = _own_pair()
    tokenizer = tiny_tokenizer()
    options = dict(do_sample=False, max_new_tokens=14, return_full_text=False)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("5A9b", **options)
    if given == "path":
        drafter.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        drafter = str(tmp_path)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert assisted("5A9b", **options) == plain
    assert happened["calls"] == 1


def test_text_streamers(capsys):
    target, drafter = pair("llama")
    tokenizer, texts = tiny_tokenizer(), []
    for extra in ({}, {"assistant_model": drafter}):
        target.generate(prompt_ids(5), streamer=TextStreamer(tokenizer), **GREEDY, **extra)
        texts.append(capsys.readouterr().out)
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    arguments = dict(streamer=streamer, assistant_model=drafter, **GREEDY)
    thread = threading.Thread(target=target.generate, args=(prompt_ids(5),), kwargs=arguments)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert texts[1] == texts[0] == "".join(pieces) + "\n" and len(pieces) > 5


def test_threads_share_a_drafter(happened):
    target, drafter = pair("llama")
    prompts = [prompt_ids(4 + i, i, batch=1 + i % 2) for i in range(6)]
    expected = [target.generate(prompt, **GREEDY) for prompt in prompts]
    results: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        results[i] = target.generate(prompts[i], assistant_model=drafter, **GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([results.get(i) for i in range(6)], expected)
    assert happened["calls"] == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_call_after_one_that_was_broken_off(error, batch, happened):
    class BreaksOff(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 7:
                raise error
            return scores

    BreaksOff.__name__ = "TemperatureLogitsWarper"  # one that our loop takes in batches
    target, drafter = pair("llama")
    ids = prompt_ids(5, batch=batch)
    with pytest.raises(error):
        target.generate(ids, assistant_model=drafter, logits_processor=LogitsProcessorList([BreaksOff()]), **GREEDY)
    assert_same(target.generate(ids, assistant_model=drafter, **GREEDY), target.generate(ids, **GREEDY))


def test_the_text_model_of_a_vision_language_model(happened):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = tiny_target("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]).config
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    target = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text.to_dict(),
            vision_config=vision.to_dict(),
            mm_tokens_per_image=4,
            image_token_index=60,
            boi_token_index=59,
            eoi_token_index=58,
        )
    ).eval()
    from tests.tiny import tiny_drafter

    drafter = tiny_drafter(target)
    arguments = GREEDY | {"max_new_tokens": 20}
    assert_same(
        target.generate(prompt_ids(5), assistant_model=drafter, **arguments),
        target.generate(prompt_ids(5), **arguments),
    )
