"""A prompt to its answers, turn by turn: the sequences that are trained on.

With `sample.regenerate: all` every assistant turn is sampled anew and the turns behind it are asked
on top of what was sampled. A turn is trained in exactly the ids it was sampled in. Two turns share
one sequence if the later prompt begins, id for id, with the earlier prompt and answer: then the
template keeps history as it was written, and one forward pass teaches both. Where it does not
(earlier reasoning is stripped, an answer's text has other ids when it is read again), the later
turn opens a sequence of its own.

A recorded tool result is kept as long as the target makes the recorded call; the conversation ends
at the first turn where it does not, since nobody can say what the tool would have answered.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import SampleSettings
from dspark.corpus.chat import render_turns
from dspark.corpus.engines import Answer, Question
from dspark.corpus.ids import id_limit
from dspark.corpus.messages import Message, conversation
from dspark.corpus.rejects import Reason, RowError
from dspark.corpus.sampling import Asked, Task, assistant_message, prompt_ids, seed_key
from dspark.corpus.tool_calls import given_calls, same_calls, split_calls

__all__ = ["Dialogue", "Interviewer", "Piece"]

Ask = Callable[[Question], Awaitable[Answer]]


@dataclass
class Piece:
    """One sequence, with the conversation up to its last answer."""

    input_ids: list[int]
    loss_mask: list[int]
    messages: list[Message]
    finish_reason: str
    limit: int
    """Most new tokens of the last answer."""
    retokenized: bool = False


@dataclass
class Dialogue:
    """What became of one task."""

    pieces: list[Piece] = field(default_factory=list)
    ended_early: str | None = None
    """Why turns of the prompt are missing."""

    @property
    def new_tokens(self) -> int:
        return sum(sum(piece.loss_mask) for piece in self.pieces)


class Interviewer:
    """Puts tasks to a target, whoever answers the questions."""

    def __init__(self, target: Asked, tokenizer: Any, settings: SampleSettings) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._settings = settings
        self._ids = min(target.vocab_size, id_limit(tokenizer))

    async def hold(self, task: Task, ask: Ask) -> Dialogue:
        """Ask until the prompt's turns are used up.

        Raises:
            RowError: an answer cannot be used. (Whatever ``ask`` raises passes through.)
        """
        done = Dialogue()
        if self._settings.regenerate == "last":
            await self._answer(task, list(task.prompt.messages), done, ask)
            return done
        history: list[Message] = []
        for given, recorded in _turns(task):
            history += given
            try:
                message = await self._answer(task, history, done, ask)
            except _CannotAsk as error:
                done.ended_early = str(error.reason)
                return done
            if recorded is None:
                return done
            if done.pieces[-1].finish_reason == "length":
                done.ended_early = "length"
                return done
            kept = _with_calls(message, recorded)
            if kept is None:
                done.ended_early = "other_tool_call"
                return done
            history.append(kept)
        return done

    async def _answer(
        self, task: Task, history: Sequence[Message], done: Dialogue, ask: Ask
    ) -> Message:
        prompt = task.prompt
        turn = len(_answers(done.pieces[-1].messages)) if done.pieces else 0
        ids, limit = task.ids, task.limit
        if done.pieces:
            try:
                ids, limit = prompt_ids(
                    self._target,
                    self._tokenizer,
                    history,
                    self._settings,
                    task.setting,
                    tools=prompt.tools,
                )
            except RowError as error:
                raise _CannotAsk(error.reason, error.detail) from error
        key = int.from_bytes(seed_key(self._settings.seed, prompt.id, task.sample)[8:16])
        question = Question(
            ids=ids,
            messages=list(history),
            tools=prompt.tools,
            setting=self._settings.settings[task.setting],
            limit=limit,
            seed=(key + turn) % 2**31,
            eos_ids=self._target.eos_ids,
        )
        answer = await ask(question)
        piece = self._piece(question, answer)
        message = piece.messages[-1]
        _join(done.pieces, piece, len(ids))
        return message

    def _piece(self, question: Question, answer: Answer) -> Piece:
        if answer.ids is None:
            return self._read_again(question, answer)
        new, ends = answer.ids, self._target.eos_ids
        if not new:
            raise RowError(Reason.NO_ANSWER, "no token")
        self._check_range(new)
        stopped = new[-1] in ends
        if ends.intersection(new[:-1]):
            raise RowError(Reason.BAD_TOKEN_IDS, "tokens behind the end of the turn")
        if not stopped and answer.finish_reason == "stop":
            raise RowError(Reason.NO_END_OF_TURN, "stopped, but not by an end-of-turn token")
        text = self._tokenizer.decode(new[:-1] if stopped else new, skip_special_tokens=False)
        return Piece(
            input_ids=[*question.ids, *new],
            loss_mask=[0] * len(question.ids) + [1] * len(new),
            messages=[
                *question.messages,
                assistant_message(self._tokenizer, question.ids, text),
            ],
            finish_reason="stop" if stopped else "length",
            limit=question.limit,
        )

    def _read_again(self, question: Question, answer: Answer) -> Piece:
        """The text through the target's template, which puts reasoning and calls in their place."""
        text = answer.text
        for end in self._target.eos_ids:
            text = text.removesuffix(self._tokenizer.decode([end], skip_special_tokens=False))
        message = {"role": "assistant", "content": text, **(answer.fields or {})}
        unparsed = answer.fields is None or (not answer.fields and "</think>" in text)
        if unparsed:
            message = assistant_message(self._tokenizer, question.ids, text)
        if answer.finish_reason == "length":
            _drop_half_character(message)
        # normalises calls and reasoning
        message = conversation({"messages": [{"role": "user", "content": "-"}, message]})[-1]
        messages = [*question.messages, message]
        rendered = render_turns(
            self._tokenizer,
            messages,
            thinking=question.setting.thinking,
            cut=answer.finish_reason == "length",
            tools=question.tools,
        )[-1]
        self._check_range(rendered.input_ids)
        start = len(question.ids)
        return Piece(
            input_ids=rendered.input_ids,
            loss_mask=[0] * start + rendered.loss_mask[start:],
            messages=messages,
            finish_reason=answer.finish_reason,
            limit=question.limit,
            retokenized=True,
        )

    def _check_range(self, ids: Sequence[int]) -> None:
        if max(ids) >= self._ids:
            raise RowError(
                Reason.ID_OUT_OF_VOCABULARY, f"{max(ids)} answered, vocabulary {self._ids}"
            )


class _CannotAsk(RowError):
    """A later turn has no prompt; the turns before it are good."""


def _drop_half_character(message: Message) -> None:
    """A cut inside a character leaves bytes that are none: no token of the target's says so.

    Raises:
        RowError: nothing else was said.
    """
    last = "content" if message.get("content") else "reasoning_content"
    if message.get(last):
        message[last] = message[last].rstrip("\ufffd")
    if not any(message.get(name) for name in ("content", "reasoning_content", "tool_calls")):
        raise RowError(Reason.NO_ANSWER, "cut inside its first character")


def _turns(task: Task) -> list[tuple[list[Message], list[Message] | None]]:
    """What is given before each answer, and the recorded answer (None: there is none)."""
    turns: list[tuple[list[Message], list[Message] | None]] = []
    given: list[Message] = []
    recorded: list[Message] = []
    for message in task.prompt.messages:
        if message["role"] == "assistant":
            recorded.append(message)
            continue
        if recorded:
            turns.append((given, recorded))
            given, recorded = [], []
        given.append(message)
    for text in task.prompt.followups:
        turns.append((given, []))
        given = [{"role": "user", "content": text}]
    return [*turns, (given, None)]


def _answers(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def _with_calls(message: Message, recorded: Sequence[Message]) -> Message | None:
    """The sampled message as the next prompt shows it; None if its calls are not the recorded."""
    wanted = []
    for one in recorded:
        listed = given_calls(one.get("tool_calls") or [])
        inline = split_calls(one["content"])[1]
        if inline is None:
            return None
        wanted += listed or inline
    if message.get("tool_calls"):
        return message if same_calls(wanted, given_calls(message["tool_calls"])) else None
    content, calls = split_calls(message["content"])
    if calls is None or not same_calls(wanted, calls):
        return None
    structured = [call for one in recorded for call in one.get("tool_calls") or []]
    if not structured:
        return message
    return {**message, "content": content, "tool_calls": structured}


def _join(pieces: list[Piece], piece: Piece, prompt: int) -> None:
    """Append, or lengthen the last piece if the new one's prompt goes on from it."""
    last = pieces[-1] if pieces else None
    if last is None or len(last.input_ids) > prompt:
        pieces.append(piece)
        return
    length = len(last.input_ids)
    if piece.input_ids[:length] != last.input_ids:
        pieces.append(piece)
        return
    piece.loss_mask[:length] = last.loss_mask
    piece.retokenized |= last.retokenized
    pieces[-1] = piece
