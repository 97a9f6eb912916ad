"""Training data from the target: its own answers to prompts, as shards with loss mask, provenance and tapped states."""

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_domino.drafter.configuration_domino import spread_taps
from hf_domino.drafter.target_domino import fingerprint

from .data import chat_tokens, read_jsonl
from .exclusion import NGRAM, Exclusion, file_digest
from .generate import Answer, Generator, Request
from .objective import Teacher, most_probable
from .prompts import Prompt, draw_prompts, read_prompts, user_turns
from .shards import ShardWriter, Text

SELF_PROMPTS = "self_prompts.jsonl"
# Settings that change how fast the data comes, not what it is.
_PACE = ("output", "batch_size", "limit", "shard_tokens")


@dataclass
class PrepareArguments:
    """What `scripts/prepare_data.py` takes."""

    output: str = field(metadata={"help": "Folder for the shards; a run that was cut short goes on in it."})
    target: str | None = field(
        default=None, metadata={"help": "Path or Hub id of the target; default: the embedded SmolLM2-135M-Instruct."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype."})
    prompts: list[str] = field(
        default_factory=list,
        metadata={"help": "JSONL files (prompt, turns, question, instruction or messages) or datasets names[:split]."},
    )
    responses: list[str] = field(
        default_factory=list,
        metadata={"help": "JSONL files of prompt, response, finished: the target's answers, to be converted only."},
    )
    self_prompts: int = field(default=0, metadata={"help": "Prompts to draw from the target itself."})
    exclude: list[str] = field(
        default_factory=list, metadata={"help": "Evaluation prompts: training prompts that share text are left out."}
    )
    limit: int | None = field(default=None, metadata={"help": "Use the first prompts only."})
    greedy_share: float = field(default=0.65, metadata={"help": "Share of the prompts answered greedily."})
    temperature: float = field(default=0.8, metadata={"help": "For the others."})
    max_new_tokens: int = field(default=256, metadata={"help": "The longest answer."})
    max_length: int = field(default=512, metadata={"help": "The longest prompt and answer together."})
    batch_size: int = field(default=64, metadata={"help": "Sequences decoded together."})
    tapped_states: bool = field(
        default=False, metadata={"help": "Store the target's tapped states too: several epochs then cost no forward."}
    )
    teacher_top_k: int | None = field(
        default=None,
        metadata={"help": "Store the target's so many most probable tokens after each, for the kl objective."},
    )
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Tapped layers, 0-based; default: spread over the target's depth."}
    )
    shard_tokens: int = field(default=65536, metadata={"help": "Tokens per shard."})
    seed: int = field(default=0, metadata={"help": "Of the sampling and of the greedy share."})

    def __post_init__(self):
        if not (self.prompts or self.responses or self.self_prompts):
            raise ValueError("Nothing to do: give prompts, responses or self_prompts.")
        if self.responses and (self.prompts or self.self_prompts):
            raise ValueError("Convert responses and answer prompts in two runs, into two folders.")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie between 0 and 1, got {self.greedy_share}.")
        if self.greedy_share < 1 and self.temperature <= 0:
            raise ValueError("Prompts that are not answered greedily need a temperature above 0.")


def prepare(arguments: PrepareArguments, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Fills `arguments.output`. Run again, it goes on where it stopped.

    Returns:
        The counts, as `data.json` holds them.

    Raises:
        ValueError: the folder holds data of other settings.
    """
    if arguments.tapped_states and arguments.target_layer_ids is None:
        arguments.target_layer_ids = spread_taps(model.config.get_text_config().num_hidden_layers)
    writer = ShardWriter(arguments.output, _settings(arguments, model, tokenizer), arguments.shard_tokens)
    exclusion = Exclusion(turn for prompt in read_prompts(arguments.exclude) for turn in prompt.turns)
    found = Found()
    job = _convert if arguments.responses else _answer
    job(arguments, model, tokenizer, writer, exclusion, found)
    writer.extra = {
        "exclusion": {
            "files": _sources(arguments.exclude),
            "evaluation_prompts": exclusion.count,
            "shared_words_in_a_row": NGRAM,
            "prompts_checked": found.checked,
            "prompts_left_out": found.shared,
        },
        "too_long": found.too_long,
        "complete": True,
    }
    writer.flush()
    return writer.counts


@dataclass
class Found:
    """What became of the prompts. shared: rows left out for sharing text with evaluation prompts."""

    checked: int = 0
    too_long: int = 0
    shared: list[int] = field(default_factory=list)


def _settings(arguments: PrepareArguments, model: Any, tokenizer: Any) -> dict[str, Any]:
    settings = {key: value for key, value in asdict(arguments).items() if key not in _PACE}
    for key in ("prompts", "responses", "exclude"):
        settings[key] = _sources(settings[key])
    return settings | {
        "target": arguments.target or getattr(model.config, "_name_or_path", None) or type(model).__name__,
        "target_fingerprint": fingerprint(model.get_input_embeddings().weight),
        "chat_template_sha256": hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest(),
    }


def _sources(names: list[str]) -> list[Any]:
    return [file_digest(name) if Path(name).is_file() else name for name in names]


def _usable(prompts: Iterable[Prompt], writer: ShardWriter, exclusion: Exclusion, found: Found) -> Iterator[Prompt]:
    """Prompts that share no text with evaluation prompts and are not done yet."""
    for prompt in prompts:
        found.checked += 1
        if any(exclusion.shares(turn) for turn in prompt.turns):
            found.shared.append(prompt.row)
        elif prompt.row not in writer.done:
            yield prompt


def _taps(arguments: PrepareArguments) -> list[int] | None:
    return [i + 1 for i in arguments.target_layer_ids or []] if arguments.tapped_states else None


# Answering prompts


def _answer(arguments: PrepareArguments, model, tokenizer, writer: ShardWriter, exclusion: Exclusion, found: Found):
    prompts = list(read_prompts(arguments.prompts))
    drawn = _self_prompts(arguments, model, tokenizer)
    prompts += [Prompt([text], len(prompts) + i) for i, text in enumerate(drawn)]
    prompts = prompts[: arguments.limit]
    source = _Conversations(arguments, tokenizer, _usable(prompts, writer, exclusion, found), found)
    generator = Generator(
        model,
        min(arguments.batch_size, len(prompts)),
        arguments.max_new_tokens,
        arguments.max_length,
        taps=_taps(arguments),
        teacher_top_k=arguments.teacher_top_k,
        seed=arguments.seed + len(writer.done),
    )
    with tqdm(total=len(prompts), initial=len(writer.done), unit="prompt", desc="answering") as bar:
        tokens = 0

        def count(decoded: int) -> None:
            nonlocal tokens
            tokens += decoded
            bar.set_postfix(tokens=tokens, refresh=False)

        for answer in generator.run(source, on_step=count):
            finished = source.take(answer)
            if finished is not None:
                writer.add(finished.sequences, finished.prompt.row)
                bar.update()


def _self_prompts(arguments: PrepareArguments, model, tokenizer) -> list[str]:
    """Prompts drawn from the target, kept in a file, so that a resumed run has the same ones."""
    if not arguments.self_prompts:
        return []
    path = Path(arguments.output) / SELF_PROMPTS
    if not path.exists():
        texts = draw_prompts(
            model,
            tokenizer,
            arguments.self_prompts,
            arguments.batch_size,
            seed=arguments.seed,
            max_new_tokens=min(192, arguments.max_length // 2),
        )
        rows = [{"prompt": text} for text in tqdm(texts, total=arguments.self_prompts, desc="drawing prompts")]
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        unfinished.replace(path)
    return [row["prompt"] for row in read_jsonl(path)]


@dataclass
class _Conversation:
    """One prompt being answered, turn by turn."""

    prompt: Prompt
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    sequences: list[Text] = field(default_factory=list)


class _Conversations:
    """The requests for a stream of prompts: each one's further turns follow when the turn before is answered."""

    def __init__(self, arguments: PrepareArguments, tokenizer, prompts: Iterator[Prompt], found: Found):
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._found = found
        self._further: deque[Request] = deque()

    def __iter__(self) -> "_Conversations":
        return self

    def __next__(self) -> Request:
        if self._further:
            return self._further.popleft()
        while True:
            prompt = next(self._prompts)
            draw = random.Random(f"{self._arguments.seed} {prompt.row}").random()
            greedy = draw < self._arguments.greedy_share
            request = self._request(_Conversation(prompt, 0.0 if greedy else self._arguments.temperature))
            if request is not None:
                return request
            self._found.too_long += 1

    def _request(self, conversation: _Conversation) -> Request | None:
        """The request for the next turn, or `None` if it leaves no room for an answer."""
        turn = conversation.prompt.turns[len(conversation.sequences)]
        conversation.messages.append({"role": "user", "content": turn})
        ids, _ = chat_tokens(self._tokenizer, conversation.messages)
        if len(ids) > self._arguments.max_length - min(16, self._arguments.max_new_tokens):
            return None
        return Request(ids, conversation.temperature, conversation)

    def take(self, answer: Answer) -> _Conversation | None:
        """Notes an answer. Returns the conversation if that was its last turn."""
        conversation: _Conversation = answer.request.key
        conversation.sequences.append(Text(answer.request.prompt, answer.tokens, answer.states, answer.teacher))
        if answer.finished and len(conversation.sequences) < len(conversation.prompt.turns):
            text = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": text})
            request = self._request(conversation)
            if request is not None:
                self._further.append(request)
                return None
        return conversation


# Converting answers that are there already


def _convert(arguments: PrepareArguments, model, tokenizer, writer: ShardWriter, exclusion: Exclusion, found: Found):
    answered = [row for path in arguments.responses for row in read_jsonl(path)][: arguments.limit]
    prompts = (Prompt(user_turns(row), number) for number, row in enumerate(answered))
    chunk: list[tuple[int, Text]] = []
    with tqdm(total=len(answered), initial=len(writer.done), unit="answer", desc="converting") as bar:
        for prompt in _usable(prompts, writer, exclusion, found):
            row = answered[prompt.row]
            text = Text(*chat_tokens(tokenizer, prompt.turns[0], row["response"], row.get("finished", True)))
            if text.length > arguments.max_length:
                found.too_long += 1
                continue
            chunk.append((prompt.row, text))
            if len(chunk) == arguments.batch_size * 8:
                _write_converted(chunk, arguments, model, writer, bar)
                chunk = []
        _write_converted(chunk, arguments, model, writer, bar)


def _write_converted(chunk: list[tuple[int, Text]], arguments: PrepareArguments, model, writer: ShardWriter, bar):
    """Sorted by length, so that batches hold little padding."""
    chunk = sorted(chunk, key=lambda item: item[1].length)
    for first in range(0, len(chunk), arguments.batch_size):
        batch = chunk[first : first + arguments.batch_size]
        texts = reread(model, [text for _, text in batch], _taps(arguments), arguments.teacher_top_k)
        for (row, _), text in zip(batch, texts, strict=True):
            writer.add([text], row)
        bar.update(len(batch))


@torch.no_grad()
def reread(model, texts: list[Text], taps: list[int] | None, teacher_top_k: int | None) -> list[Text]:
    """The texts with what the target holds at each of their tokens, by one forward over all of them (one a text where
    its distributions are wanted: the logits of many at once are large).

    Args:
        taps: entries of `hidden_states` to keep, in bfloat16. teacher_top_k: tokens to keep of each distribution.
    """
    if teacher_top_k is not None and len(texts) > 1:
        return [reread(model, [text], taps, teacher_top_k)[0] for text in texts]
    if taps is None and teacher_top_k is None:
        return texts
    rows = [torch.tensor(text.prompt + text.answer) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    answer = len(texts[0].answer) + 1  # the logits that it was chosen from, and those after it
    # Where only states are read, no row of logits at all (`DominoTrainer.target_says` says why).
    kept = answer if teacher_top_k else torch.empty(0, dtype=torch.long)
    output = model(ids, output_hidden_states=taps or False, use_cache=False, logits_to_keep=kept)
    if taps is not None:
        states = torch.cat([output.hidden_states[index] for index in taps], dim=-1).bfloat16().cpu()
        texts = [text._replace(states=states[i, : text.length].clone()) for i, text in enumerate(texts)]
    if teacher_top_k is not None:
        best = most_probable(output.logits[0, :-1], teacher_top_k)
        texts = [texts[0]._replace(teacher=Teacher(*(part.cpu() for part in best)))]
    return texts
