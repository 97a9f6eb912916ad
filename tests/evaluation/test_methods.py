import pytest
import torch
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_domino.drafter.candidate_generator_domino import DominoCandidateGenerator
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target
from hf_domino.evaluation.measuring import measure
from hf_domino.evaluation.methods import Contenders, Unavailable, build_method
from hf_domino.evaluation.native_dflash import NativeDFlashAssistant
from hf_domino.evaluation.variants import variant
from tests.tiny import prompt_ids, skilled_drafter, tiny_drafter, tiny_target

GREEDY = {"max_new_tokens": 24, "do_sample": False}
NAMES = ("domino", "domino-chain", "base", "base-tree", "native-dflash", "prompt-lookup", "domino[block_size=3]")


def prompt(seed=0):
    return prompt_ids(7, seed)[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_the_plain_text(contenders, name):
    plain, method = (build_method(n, contenders) for n in ("plain", name))
    for seed in range(3):
        expected = measure(contenders.model, plain, [prompt(seed)], **GREEDY)
        found = measure(contenders.model, method, [prompt(seed)], **GREEDY)
        assert found.tokens == expected.tokens
        assert found.seconds > found.draft_seconds + found.verify_seconds > 0
        from_prefill = len(found.tokens[0]) - sum(found.accepted) - len(found.accepted)
        assert from_prefill == 1 or (name == "prompt-lookup" and from_prefill >= 1)
    assert "_get_candidate_generator" not in vars(contenders.model)


def test_plain_has_no_rounds(contenders):
    found = measure(contenders.model, build_method("plain", contenders), [prompt()], **GREEDY)
    assert (found.accepted, found.draft_seconds, found.verify_seconds) == ([], None, None)


def test_the_head_helps_a_skilled_drafter(contenders):
    accepted = {}
    for name in ("domino", "domino-chain", "base"):
        method = build_method(name, contenders)
        runs = [measure(contenders.model, method, [prompt(seed)], **GREEDY) for seed in range(4)]
        accepted[name] = sum(sum(run.accepted) for run in runs)
    assert accepted["domino"] > accepted["base"]
    assert accepted["domino-chain"] > accepted["base"]


def test_chain_runs_in_transformers_loop(contenders, monkeypatch):
    calls = []
    original = DominoCandidateGenerator.get_candidates
    monkeypatch.setattr(
        DominoCandidateGenerator, "get_candidates", lambda self, *a, **k: calls.append(1) or original(self, *a, **k)
    )
    measure(contenders.model, build_method("domino-chain", contenders), [prompt()], **GREEDY)
    assert calls
    assert contenders.drafters[""].use_tree


@pytest.mark.parametrize("shift_label", [True, False])
def test_native_dflash_drafts_what_the_backbone_drafts(shift_label, monkeypatch):
    target = tiny_target(context=0.2)
    drafter = tiny_drafter(target, shift_label=shift_label, candidate_pool_size=None)
    base = variant(drafter, head_type="none")
    view = Target(target, drafter.config)
    session = DraftingSession(base, view)
    rounds = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def compare(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        result = original(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs)
        if not is_first_iteration and result[0].shape[1] > input_ids.shape[1]:
            tapped = view.tapped_states(model_outputs.hidden_states)
            count = tapped.shape[1] if not session.memory.lengths else int(n_last_matches) + 1
            session.observe(tapped[:, :count], [count])
            expected = session.propose(input_ids[:, -1], base.config.max_drafts, 1).tokens_BDW[..., 0]
            rounds.append(torch.equal(result[0][:, input_ids.shape[1] :], expected))
        return result

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", compare)
    method = build_method("native-dflash", Contenders(target, None, {"": drafter}))
    measure(target, method, [prompt()], **GREEDY)
    assert len(rounds) > 5
    assert all(rounds)


def test_native_dflash_with_a_drafter_of_another_dtype():
    target = tiny_target()
    method = build_method("native-dflash", Contenders(target.bfloat16(), None, {"": tiny_drafter(target).float()}))
    assert measure(target, method, [prompt()], **GREEDY).drafted


def test_native_dflash_where_it_does_not_apply():
    target = tiny_target()
    drafter = tiny_drafter(
        target, layer_types=["sliding_attention", "full_attention"], sliding_window=8, use_sliding_window=True
    )
    with pytest.raises(ValueError, match="sliding"):
        NativeDFlashAssistant(drafter)
    with pytest.raises(Unavailable, match="sliding"):
        build_method("native-dflash", Contenders(target, None, {"": drafter}))


def test_assisted_needs_a_model(contenders):
    with pytest.raises(Unavailable, match="assistant"):
        build_method("assisted", contenders)
    small = tiny_target(seed=3, num_hidden_layers=1)
    method = build_method("assisted", Contenders(contenders.model, contenders.tokenizer, contenders.drafters, small))
    plain = measure(contenders.model, build_method("plain", contenders), [prompt()], **GREEDY)
    assert measure(contenders.model, method, [prompt()], **GREEDY).tokens == plain.tokens


def test_sampling_repeats_with_the_seed(contenders):
    sampled = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7}
    method = build_method("domino", contenders)
    texts = [measure(contenders.model, method, [prompt()], seed, **sampled).tokens for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    plain = measure(contenders.model, build_method("plain", contenders), [prompt()], 0, **sampled)
    assert plain.tokens == texts[0]


def test_batches(contenders):
    prompts = [prompt(), prompt(1)[:4]]
    methods = [build_method(name, contenders) for name in ("plain", "domino")]
    plain, ours = (measure(contenders.model, method, prompts, **GREEDY) for method in methods)
    assert plain.tokens == ours.tokens
    alone = measure(contenders.model, build_method("plain", contenders), [prompts[1]], **GREEDY)
    assert plain.tokens[1] == alone.tokens[0]


def test_labelled_drafters_and_settings(contenders):
    other = skilled_drafter(contenders.model)
    both = Contenders(contenders.model, contenders.tokenizer, contenders.drafters | {"other-1": other})
    assert build_method("domino:other-1", both).drafter is other
    changed = build_method("domino:other-1[block_size=3,candidate_pool_size=None]", both).drafter
    assert (changed.config.block_size, changed.config.candidate_pool_size) == (3, None)
    joined = build_method("domino+prompt-lookup", both)
    assert set(joined.arguments) == {"assistant_model", "prompt_lookup_num_tokens"}
    assert joined.drafter is both.drafters[""]
    assert build_method("prompt-lookup[num_tokens=3]", both).arguments == {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize(("name", "message"), [
    ("dominoes", "no method"), ("domino:none", "no drafter labelled"), ("plain[block_size=3]", "uses no drafter"),
    ("prompt-lookup[num_tokens=0]", "at least 1"), ("prompt-lookup[length=3]", "num_tokens alone"),
    ("domino[3]", "key=value"), ("domino[block_size=1]", "block_size"), ("domino+base", "both set assistant_model"),
])  # fmt: skip
def test_names_that_mean_nothing(contenders, name, message):
    with pytest.raises(ValueError, match=message):
        build_method(name, contenders)


def test_compiled_methods_say_that_a_compiler_is_missing(contenders, monkeypatch):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    for name in ("plain-compiled", "domino-compiled"):
        with pytest.raises(Unavailable, match=r"install g\+\+"):
            build_method(name, contenders)


@pytest.mark.parametrize("name", ["plain-compiled", "domino-compiled"])
def test_compiled_methods_are_compiled_and_the_same(name, contenders, monkeypatch):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "c++")
    method = build_method(name, contenders)
    method.arguments["compile_config"].backend = "eager"  # the kernels are not what is tested
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = measure(contenders.model, method, [prompt()], max_new_tokens=4, do_sample=False)
    plain = measure(contenders.model, build_method("plain", contenders), [prompt()], max_new_tokens=4, do_sample=False)
    assert found.tokens == plain.tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert bool(found.verify_seconds) == (name == "domino-compiled")
