"""What a user of asyncio holds: a model ready to generate, in a thread or a process of its own."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from ..common import garbage
from ..common.errors import ClosedError, LaminaError, RequestError
from ..common.forks import require_same_process
from ..common.progress import Progress
from .adapters.names import LoadedAdapter, checked_path, find_adapter
from .core_choice import EngineKind, core_handle, reported_in
from .engine.async_client import AsyncClient, EngineHealth, EngineListener, Generation, Health
from .engine.beam_driver import BeamRounds, Searched
from .engine.beam_search import BeamSearchParams
from .engine.core_handle import CoreHandle, OpenedCore
from .engine.input_processor import InputProcessor, input_processor
from .engine.outputs import RequestOutput
from .engine.parallel_sampling import ParentRequest
from .engine.pooling_outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from .engine.pooling_processor import PoolingProcessor, TextOptions
from .protocol.core_description import CoreDescription
from .request_options import RequestOptions
from .sampling_params import SamplingParams
from .validation import text
from .weight_messages import FILE, plain_of, written

if TYPE_CHECKING:
    from .keywords import RequestSettings, RuntimeSettings
    from .prompts import Prompt, Prompts
    from .tokenization.chat_messages import Messages
    from .weight_messages import Weights

STEP_TIMEOUTS = {"cpu": 30.0, "cuda": 4.0}  # seconds, by device: a step on a CPU may take in a long prompt


class AsyncRuntime:
    """A loaded model for asyncio; the end of an `async with` block, or close(), gives everything back.

    The engine runs beside the event loop, so that neither waits for the other. One event loop at a time uses
    it: its thread calls everything here. Every call but close() and health() raises ClosedError after
    close(), EngineDeadError once the engine is lost, and UnsupportedError in a forked child.
    """

    def __init__(self, handle: CoreHandle, opened: OpenedCore, step_timeout: float | None = None) -> None:
        """handle: of a core that is open; most callers want from_pretrained()."""
        self.description: CoreDescription = opened.description
        self.input: InputProcessor = input_processor(opened.description, opened.tokenizer, opened.grammars)
        self.pooling = PoolingProcessor(input=self.input)
        if step_timeout is None:
            step_timeout = STEP_TIMEOUTS.get(opened.description.device.partition(":")[0], 30.0)
        self._client = AsyncClient(handle, step_timeout)
        self._pid = os.getpid()
        self._loading = asyncio.Lock()  # of adapters: one at a time is loaded or unloaded
        self._searches: dict[str, Searched] = {}  # beam searches that go on, by their own names
        self._thresholds: garbage.Thresholds | None = None  # of collections, before they were made seldom

    @classmethod
    async def from_pretrained(
        cls,
        model: str | Path,
        *,
        engine: EngineKind = "thread",
        progress: Progress | None = None,
        step_timeout: float | None = None,
        **settings: "Unpack[RuntimeSettings]",
    ) -> Self:
        """Returns a runtime for a folder of safetensors, a .gguf file or a hub id.

        engine: "thread" for a thread of this process, "process" for a process of its own; with
        data_parallel above 1 there are so many. progress(stage, fraction, detail) is called in the event
        loop's thread. step_timeout: seconds after which health() calls a step hanging; by
        default 30 on a CPU and 4 on a GPU. settings and errors: those of Runtime.from_pretrained. To cancel
        it ends the loading.
        """
        loop = asyncio.get_running_loop()
        handle = core_handle(engine, model, settings, reported_in(loop, progress))
        try:
            opened = await asyncio.wrap_future(handle.opened)
            return cls(handle, opened, step_timeout)
        except BaseException:
            await asyncio.to_thread(handle.close)
            raise

    def generate(
        self,
        prompt: "Prompt",
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> Generation:
        """Returns the answers to one prompt as they are written: checked now, and queued at once.

        request_id: what abort() and the answer call it; several may share one. options: the fields of
        RequestOptions. Raises RequestError for what cannot be honoured.
        """
        given = RequestOptions(**options)
        return self.queue(self.input.prepare_one(prompt, params, given, _checked_id(request_id)))

    def queue(self, asked: ParentRequest) -> Generation:
        """Queues what `input` has prepared, or `pooling`, and nobody else has queued; returns its answers."""
        require_same_process(self._pid)
        _require_loop()
        return self._client.generate(asked)

    async def beam_search(
        self,
        prompt: "Prompt",
        params: BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> RequestOutput:
        """Returns the likeliest continuations of one prompt, the best first; otherwise as generate().

        What is asked beside it is served in the same steps. It ends within a step where its task is
        cancelled; abort() and a timeout end it with what it has found.
        """
        require_same_process(self._pid)
        given = RequestOptions(**options)
        rounds = BeamRounds(given, self.input.adapters.digest_of(given.adapter))
        searched = self.input.prepare_search(prompt, params, _checked_id(request_id))
        self._searches[searched.name] = searched
        try:
            for submissions in rounds.of([searched]):
                parent = ParentRequest(
                    prompt=None, num_wanted=len(submissions), submissions=tuple(submissions)
                )
                await self._client.generate(parent).ended()
        finally:
            del self._searches[searched.name]
        await self.call("count_whole", searched.times, searched.num_tokens)
        return searched.output(self.input.tokenizer)

    async def embed(
        self,
        texts: "Prompts",
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> list[EmbeddingOutput]:
        """Returns the vector of each text, in order; arguments and errors as of Runtime.embed().

        All end within a step where its task is cancelled.
        """
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        asked = self.pooling.embed(
            texts, given, RequestOptions(**options), dimensions=dimensions, normalize=normalize
        )
        return self.pooling.embeddings(await self._outputs_of(asked))

    async def classify(
        self,
        texts: "Prompts",
        *,
        activation: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> list[ClassificationOutput]:
        """Returns the classes of each text; arguments as of Runtime.classify(), otherwise as embed()."""
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        asked = self.pooling.classify(texts, given, RequestOptions(**options), activation=activation)
        return self.pooling.classes(await self._outputs_of(asked))

    async def score(
        self,
        query: "Prompts",
        documents: "Prompts",
        *,
        activation: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> list[ScoreOutput]:
        """Returns how well documents answer a query; arguments as of Runtime.score()."""
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        asked, parts = self.pooling.score(
            query, documents, given, RequestOptions(**options), activation=activation
        )
        return self.pooling.scores(await self._outputs_of(asked), parts)

    async def warm_up(self) -> None:
        """Computes a token, and a result of one where the model makes such: then it can be asked.

        Several engines have one request each: they have no other, and take turns.
        """
        engines = self.engines()
        if "generate" in self.input.tasks:
            canary = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            await asyncio.gather(*(self.generate([0], canary).output() for _ in engines))
        if self.input.pooling is not None:
            await asyncio.gather(*(self.pool(self.pooling.warming()).output() for _ in engines))

    def pool(self, asked: ParentRequest, request_id: str | None = None) -> Generation:
        """Queues what `pooling` has made of a text; its output has the result.

        request_id: what abort() calls it.
        """
        if request_id is not None:
            for submission in asked.submissions:
                submission.answer.asked_id = request_id
        return self.queue(asked)

    async def _outputs_of(self, asked: Iterable[ParentRequest]) -> list[RequestOutput]:
        made = [*asked]  # all are checked before the first is queued
        generations = [self.pool(each) for each in made]  # dropped, they end
        return [await generation.output() for generation in generations]

    def chat(
        self,
        messages: "Messages",
        params: SamplingParams | None = None,
        *,
        tools: "Messages | None" = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        request_id: str | None = None,
        **options: "Unpack[RequestSettings]",
    ) -> Generation:
        """Returns the answers to a conversation as they are written; arguments as in Runtime.chat()."""
        template = tools, template_kwargs, continue_final_message, chat_template
        ids = self.input.chat_prompt(messages, *template, add_generation_prompt=True)
        return self.generate(ids, self.input.chat_params(params), request_id=request_id, **options)

    async def abort(self, request_id: str) -> bool:
        """Ends every answer of that id within a step, each with finish_reason "abort"; False without any."""
        require_same_process(self._pid)
        searches = [each for each in self._searches.values() if each.asked_id == request_id]
        for each in searches:  # whose live requests may have all ended, before those of the next round
            each.is_aborted = True
        return self._client.abort(request_id) or bool(searches)

    def fail(self, error: LaminaError) -> None:
        """Ends every answer that is being written by this error; more may be asked."""
        require_same_process(self._pid)
        self._client.fail(error)

    def health(self) -> Health:
        """Returns whether it can answer now, and if not why; any thread may ask, and it never waits."""
        return self._client.health()

    def engines(self) -> tuple[EngineHealth, ...]:
        """Returns how each engine is, of which data_parallel says the number; otherwise as health()."""
        return self._client.engines()

    @property
    def max_num_seqs(self) -> int:
        """Requests that are computed at once, at most, by the engines that take any."""
        each: int = self.description.settings["max_num_seqs"]
        return each * self._client.num_taking

    def drain_engine(self, engine: int) -> None:
        """Gives an engine no new requests until resume_engine(); what it has goes on.

        RequestError for the last that takes requests, and for one that there is not.
        """
        self._client.several.drain(engine)

    def resume_engine(self, engine: int) -> None:
        """Gives an engine requests again; RequestError for one that there is not."""
        self._client.several.resume(engine)

    async def stats(self, engine: int | None = None) -> dict[str, Any]:
        """Returns counters and settings, under the names of Runtime.stats().

        engine: the number of one; else counts are those of all, and "engines" has those of each.
        """
        found: dict[str, Any] = await self._client.call("stats", engine=engine)
        return found

    async def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until wake(), as Runtime.sleep() does; requests wait meanwhile."""
        await self.call("sleep", level)

    async def wake(self) -> None:
        """Takes the memory again, as Runtime.wake() does; LoadError where dropped weights cannot be read."""
        await self.call("wake")

    async def update_weights(self, weights: "Weights") -> None:
        """Replaces weights in place, between two steps: what Runtime.update_weights() takes, says and raises.

        Tensors for an engine in a process of its own travel by a file, in memory where there is room.
        """
        kind, value = plain_of(weights)
        if kind == "tensors" and not self._client.takes_objects:
            with await asyncio.to_thread(written, value) as folder:
                await self.call("update_weights", "file", os.path.join(folder, FILE))
        else:
            await self.call("update_weights", kind, value)

    async def is_sleeping(self) -> bool:
        """Returns whether sleep() was called, and wake() was not since."""
        return bool(await self.call("is_sleeping"))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of the engine returns, between two steps.

        "stats", "explain", "explain_html"; "fingerprint", a text that is equal where equal requests get equal
        answers, to the bit; "suspend" drops every captured CUDA graph, and "resume" captures them again, both
        of which raise RequestError while requests are live. UnsupportedError for others.
        """
        require_same_process(self._pid)
        return await self._client.call(method, *arguments)

    async def load_adapter(self, name: str, path: str | Path) -> LoadedAdapter:
        """Loads a LoRA adapter of PEFT's from its folder; otherwise as Runtime.load_adapter()."""
        folder = checked_path(name, path)
        async with self._loading:
            return self.input.adapters.add(name, folder, await self.call("load_adapter", folder))

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; otherwise as Runtime.unload_adapter()."""
        async with self._loading:
            digest = self.input.adapters.remove(name)
            if digest is not None:
                await self.call("unload_adapter", digest)

    async def find_adapter(self, name: str) -> bool:
        """Returns whether an adapter of that name is loaded, once installed packages were asked for it."""
        if name not in self.input.adapters and self.description.max_loras:
            path = await asyncio.to_thread(find_adapter, name)
            if path is not None:
                await self.load_adapter(name, path)
        return name in self.input.adapters

    def listen(self, listener: EngineListener) -> None:
        """Has a listener told of every step's outputs and of every answer's end."""
        self._client.listen(listener)

    def freeze_garbage(self) -> None:
        """Leaves out of every later garbage collection what is there now, and has them seldom, until close().

        A server does so once it is ready: collections then take no milliseconds out of a step. It is the
        whole process's, so a program that does more than serve may rather not.
        """
        if self._thresholds is None:
            self._thresholds = garbage.freeze()

    async def close(self, timeout: float = 10.0) -> None:
        """Ends every request, each with finish_reason "abort", and gives back memory; twice is once.

        timeout: seconds after which an engine that hangs is ended by force, or left behind in its thread.
        """
        if self._pid != os.getpid():  # in a forked child nothing of it works
            return
        if self._thresholds is not None:
            thresholds, self._thresholds = self._thresholds, None
            garbage.unfreeze(thresholds)
        closed = ClosedError("this runtime was closed; make a new one with AsyncRuntime.from_pretrained")
        await self._client.close(closed, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _checked_id(request_id: str | None) -> str | None:
    return None if request_id is None else text("request_id", request_id)


def _require_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RequestError(
            "generate() was called where no event loop runs; call it in a coroutine, or use Runtime"
        ) from None
