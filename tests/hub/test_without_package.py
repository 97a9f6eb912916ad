"""A published drafter in processes that know transformers and torch only, and beside the package."""

import json
import re
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from hf_domino import DominoDraftModel
from hf_domino.hub import adapter_card
from hf_domino.hub.layout import CARD, CODE_FILES
from tests.hub.client_calls import publish
from tests.hub.helpers import DRAFTER, NEW, TARGET, adapter_record, files_of
from tests.hub.hub_server import HubServer
from tests.tiny import plain_text, prompt_ids

LOAD_AND_GENERATE = """
import importlib.util, json, sys, torch
if not {package}:
    sys.modules["hf_domino"] = None  # as if it were not installed, which it is where these tests run
else:
    assert importlib.util.find_spec("hf_domino") is not None
from transformers import AutoModel, AutoModelForCausalLM
ids = torch.tensor({ids})
options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
model = AutoModelForCausalLM.from_pretrained("{target}", dtype=torch.float32)
"""
REMOTE = (
    LOAD_AND_GENERATE
    + """
drafter = AutoModel.from_pretrained("{drafter}", trust_remote_code=True, dtype=torch.float32)
assert type(drafter).__module__.startswith("transformers_modules."), type(drafter).__module__
out = {{"remote": model.generate(ids, assistant_model=drafter, **options).tolist(),
       "drafted": sum(drafter.drafting_stats.drafted), "accepted": sum(drafter.drafting_stats.accepted)}}
causal = AutoModelForCausalLM.from_pretrained("{drafter}", trust_remote_code=True, dtype=torch.float32)
assert type(causal) is type(drafter)
out["custom"] = model.generate(ids, custom_generate="{drafter}", trust_remote_code=True, **options).tolist()
drafter.save_pretrained("saved")
again = AutoModel.from_pretrained("./saved", trust_remote_code=True, dtype=torch.float32)
out["saved"] = model.generate(ids, assistant_model=again, **options).tolist()
drafter.export_for_engines("engines")
"""
)
PACKAGE = """
from hf_domino import DominoDraftModel
own = DominoDraftModel.from_pretrained("{drafter}", dtype=torch.float32)
assert type(own).__module__ == "hf_domino.drafter.modeling_domino"
out["package"] = model.generate(ids, assistant_model=own, **options).tolist()
exported = DominoDraftModel.from_pretrained("engines", dtype=torch.float32)
assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), own.parameters(), strict=True))
untrusted = AutoModel.from_pretrained("{drafter}", dtype=torch.float32)
assert type(untrusted) is DominoDraftModel
"""
IDS = prompt_ids(7, seed=3)
STANDARD = {
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "functools",
    "importlib",
    "heapq",
    "inspect",
    "itertools",
    "json",
    "logging",
    "math",
    "os",
    "pathlib",
    "re",
    "statistics",
    "time",
    "types",
    "typing",
    "warnings",
    "weakref",
}


def _expected(target) -> list[list[int]]:
    return plain_text(target, IDS, max_new_tokens=24).tolist()


def _filled(code: str, package: bool) -> str:
    return code.format(package=package, ids=IDS.tolist(), target=TARGET, drafter=NEW) + "\nprint(json.dumps(out))"


def test_without_the_package(fresh_python, client, target, new: Path, tmp_path: Path) -> None:
    client(publish, new, NEW)
    out = json.loads(fresh_python(_filled(REMOTE, package=False)).splitlines()[-1])
    expected = _expected(target)
    assert out["remote"] == out["custom"] == out["saved"] == expected
    assert out["drafted"] > 0 and out["accepted"] > 0
    assert {path.name for path in (tmp_path / "engines").iterdir()} == {"config.json", "model.safetensors"}


def test_both_copies_together(fresh_python, client, target, new: Path) -> None:
    client(publish, new, NEW)
    out = json.loads(fresh_python(_filled(REMOTE + PACKAGE, package=True), package=True).splitlines()[-1])
    assert out["remote"] == out["custom"] == out["saved"] == out["package"] == _expected(target)


def snippet_of(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


# The warning is PEFT's own: it asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_cards_snippets_run_as_printed(fresh_python, hub: HubServer, staged: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=8, target_modules=["q_proj", "fc"], init_lora_weights=False)
    get_peft_model(DominoDraftModel.from_pretrained(staged), config).save_pretrained(tmp_path / "adapter")
    hub.add_repo("org/tiny-lora", files_of(tmp_path / "adapter"))
    snippets = [snippet_of((staged / CARD).read_text()), snippet_of(str(adapter_card(adapter_record())))]
    assert all(TARGET in snippet and DRAFTER in snippet for snippet in snippets)
    check = """
stats = (drafter.get_base_model() if hasattr(drafter, "get_base_model") else drafter).drafting_stats
assert stats.drafted
assert output.shape[1] > inputs["input_ids"].shape[1]
texts = [*globals().get("texts", []), output.tolist()]
"""
    assert fresh_python(check.join([*snippets, "assert texts[0] == texts[1]\n"])).strip()


def test_offline_after_one_load(fresh_python, hub: HubServer) -> None:
    load = f"""
from transformers import AutoModel
print(sum(p.double().sum().item() for p in AutoModel.from_pretrained("{DRAFTER}", trust_remote_code=True).parameters()))
"""
    first = fresh_python(load)
    hub.requests.clear()
    assert fresh_python(load, HF_HUB_OFFLINE="1") == first
    assert hub.requests == []


@pytest.mark.parametrize("name", sorted(CODE_FILES))
def test_code_stands_alone(name: str) -> None:
    """Flat siblings: one dot, no package, nothing beyond torch, transformers and what transformers brings."""
    code = CODE_FILES[name].read_text()
    imports = re.findall(r"^\s*(?:from\s+(\S+)\s+import|import\s+(\S+))", code, re.MULTILINE)
    for module in (first or second for first, second in imports):
        if module.startswith("."):
            assert f"{module[1:]}.py" in CODE_FILES, f"{name} imports {module}"
        else:
            top = module.split(".")[0]
            assert top in STANDARD | {"torch", "transformers", "huggingface_hub", "safetensors"}, f"{name}: {module}"
