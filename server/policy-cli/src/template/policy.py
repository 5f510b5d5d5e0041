"""Closes reasoning that becomes long.

One instance serves one request, so globals of this module are the state of that request.
"""

from steersman_policy import Plan, reporting
from wit_world import exports
from wit_world.imports import types

REASONING_TOKENS = 1024  # limit on reasoning tokens

# A hook is called if wit/world.wit exports it.


class OnRequest(exports.OnRequest):
    @reporting
    def on_request(self, request: types.RequestView) -> types.Plan:
        return Plan(reasoning=request.reasoning, every=16)


class OnStep(exports.OnStep):
    @reporting
    def on_step(self, step: types.Step) -> list[types.Action]:
        if step.phase == types.Phase.REASONING and step.reasoning_tokens >= REASONING_TOKENS:
            return [types.Action_CloseReasoning("In short: ")]
        return []
