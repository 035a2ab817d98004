"""Which phase of a step the engine is in, and whether a training pass is open. Shared by the loop and the runtime."""

from __future__ import annotations

import threading
from typing import Final

from infinity.errors import EngineStateError
from infinity.states import PHASE_TRANSITIONS, StepPhase

_CALLS: Final = {
    StepPhase.FORWARD: "forward",
    StepPhase.BACKWARD: "backward()",
    StepPhase.OPTIMIZER: "step()",
    StepPhase.CHECKPOINT: "what saves or loads all state",
    StepPhase.CLOSED: "destroy()",
}
"""What a user calls who gets the engine there."""


class Phases:
    def __init__(self, model_name: str) -> None:
        self._model, self._engine = model_name, f"the engine of {model_name}"
        self.phase = StepPhase.IDLE
        self._thread = threading.get_ident()
        """The one that is in ``phase``."""
        self.states_are_away = False
        """Some were moved out of device memory, see ``offloading``."""
        self.in_training_pass = False
        """A pass lasts from the first forward of a step to its update. An evaluation in between runs inside it."""

    def go(self, phase: StepPhase) -> None:
        """Raises EngineStateError if the engine cannot get there from where it is."""
        self.check(phase)
        self.phase, self._thread = phase, threading.get_ident()

    def check(self, phase: StepPhase) -> None:
        """Raises EngineStateError if the engine cannot get to the phase from where it is."""
        if phase is not StepPhase.CLOSED:
            self.refuse_failed()
        if self.phase is StepPhase.CLOSED:
            raise EngineStateError(f"{self._engine} was destroyed: build the model anew and call infinity.initialize()")
        if self.states_are_away and phase in (StepPhase.BACKWARD, StepPhase.OPTIMIZER):
            raise EngineStateError(f"states of {self._engine} were offloaded: call reload_states() before it trains on")
        if phase not in PHASE_TRANSITIONS[self.phase]:
            self.refuse_within(self.phase, _CALLS.get(phase, phase.name))

    def refuse_beside_update(self) -> None:
        """Raises EngineStateError while another thread updates the weights, or loads others: what is gathered then
        belongs to no step."""
        if self.phase in (StepPhase.OPTIMIZER, StepPhase.CHECKPOINT) and self._thread != threading.get_ident():
            raise EngineStateError(
                f"{self._engine} is in {self.phase.name}: use the weights before or after it, or take turns with "
                "the thread that trains, by a threading.Lock"
            )

    def refuse_within(self, phase: StepPhase, call: str) -> None:
        """Raises EngineStateError if the engine is in this phase."""
        if self.phase is phase:
            raise EngineStateError(
                f"{self._engine} is in {phase.name}: call {call} when that is over, not inside it (a signal's handler "
                "or a hook notes that it was called, and the loop asks for that between steps)"
            )

    def refuse_failed(self) -> None:
        """Raises EngineStateError if the weights belong to no step."""
        if self.phase is StepPhase.FAILED:
            raise EngineStateError(
                f"{self._engine} has failed, its state is half a step ahead or half loaded: call destroy(), build the "
                "model anew, and go on from a checkpoint with engine.load_checkpoint()"
            )

    def refuse_over(self, call: str) -> None:
        """Raises EngineStateError if the weights are gone, or belong to no step."""
        self.refuse_failed()
        if self.phase is StepPhase.CLOSED:
            raise EngineStateError(f"{call}() of {self._model}: its engine was destroyed: call it before destroy()")

    @property
    def is_over(self) -> bool:
        return self.phase in (StepPhase.FAILED, StepPhase.CLOSED)
