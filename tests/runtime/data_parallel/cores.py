"""Engines whose messages a test writes itself, and the books over them."""

from concurrent.futures import Future

from lamina.runtime.data_parallel.member import Member
from lamina.runtime.data_parallel.replicas import Replicas
from lamina.runtime.data_parallel.router import Router
from lamina.runtime.protocol.core_messages import AddRequests, Call, CoreStatus, Reply, StepOutputs
from lamina.runtime.protocol.engine_output import EngineOutput, Finish, Timeline
from lamina.runtime.protocol.engine_request import EngineRequest
from lamina.runtime.sampling_params import SamplingParams


class Core:
    """Keeps what it is sent; says what it is made to."""

    takes_objects = False

    def __init__(self):
        self.opened = Future()
        self.sent = []
        self.reason = None
        self.hangs = None
        self.is_dropped = False
        self._receive = None

    def start(self, receive):
        self._receive = receive

    def send(self, command):
        self.sent.append(command)

    def status(self):
        return CoreStatus(is_alive=self.reason is None, reason=self.reason or self.hangs, num_steps=5)

    def drop(self):
        self.is_dropped = True

    def close(self, timeout=10.0):
        self.die("it was closed")

    def say(self, message):
        self._receive(message)

    def die(self, reason="it was killed"):
        self.reason = reason
        self._receive(None)

    @property
    def calls(self):
        return [each for each in self.sent if isinstance(each, Call)]

    @property
    def requests(self):
        return [
            request.request_id
            for each in self.sent
            if isinstance(each, AddRequests)
            for request in each.requests
        ]

    def answer(self, value=None, error=None):
        """Reply to the last call."""
        self.say(Reply(number=self.calls[-1].number, value=value, error=error))


class Books:
    """Replicas over such cores, and what came of them."""

    def __init__(self, num_engines=2, num_ranks=1):
        self.cores = [Core() for _ in range(num_engines)]
        self.lost, self.said = [], []
        members = [Member(number, core) for number, core in enumerate(self.cores)]
        self.router = Router(num_engines, block_size=4, num_blocks=64)
        self.replicas = Replicas(members, self.router, self.lost.append, num_ranks=num_ranks)
        self.replicas.start(self.said.append)

    def add(self, *ids, prompt=(1, 2, 3)):
        requests = tuple(
            EngineRequest(
                request_id=each, prompt_token_ids=prompt, params=SamplingParams(), max_total_tokens=9
            )
            for each in ids
        )
        return self.replicas.send(AddRequests(requests=requests))

    def call(self, method, *arguments, number=1, engine=None):
        self.replicas.send(Call(number=number, method=method, arguments=arguments, engine=engine))

    def ended(self):
        """The errors by which requests ended, by id."""
        return {
            output.request_id: output.finish.error
            for message in self.said
            if isinstance(message, StepOutputs)
            for output in message.outputs
            if output.finish is not None
        }


def finished(request_id):
    return StepOutputs(
        outputs=(
            EngineOutput(
                request_id=request_id,
                num_before=0,
                new_token_ids=(1,),
                finish=Finish(reason="length", times=Timeline()),
            ),
        )
    )
