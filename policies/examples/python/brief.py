"""Keeps replies brief: limits reasoning, ends the answer at a phrase, bans a token, and repairs tool calls that
already have a result.

One instance serves one request, so these globals are the state of that request.
"""

from steersman_policy import Plan, reporting
from wit_world import exports
from wit_world.imports import types

budget = 100  # limit on reasoning tokens: the parameter `budget`
phrase = ""  # text that ends the answer: the parameter `phrase`
ban = None  # a token to ban from the first step on: the parameter `ban`
tail = ""  # the end of the answer so far, in which the phrase may begin


def number(params, name, notes):
    """Parses a number of up to nine digits; anything else becomes a note."""
    text = params.get(name)
    if text is None:
        return None
    if 1 <= len(text) <= 9 and all(digit in "0123456789" for digit in text):
        return int(text)
    notes.append(f"parameter `{name}` cannot be `{text}`")
    return None


class OnRequest(exports.OnRequest):
    @reporting
    def on_request(self, request: types.RequestView) -> types.Plan:
        global budget, phrase, ban
        params = dict(request.params)
        notes = []
        limit = number(params, "budget", notes)
        if limit is not None:
            budget = limit
        if request.reasoning_budget is not None:
            budget = min(budget, request.reasoning_budget)
        ban = number(params, "ban", notes)
        phrase = params.get("phrase", "")
        return Plan(
            reasoning=request.reasoning,
            reasoning_budget=budget,
            every=8,
            note="; ".join(notes) or None,
        )


class OnStep(exports.OnStep):
    @reporting
    def on_step(self, step: types.Step) -> list[types.Action]:
        global ban, tail
        actions = []
        if ban is not None:
            actions.append(types.Action_Ban(types.Ban(tokens=[ban], steps=0)))
            ban = None  # once is enough: the ban holds for the rest of the reply
        reasons = step.phase == types.Phase.REASONING
        if reasons and (step.budget_reached or step.reasoning_tokens >= budget):
            actions.append(types.Action_CloseReasoning("In short: "))
        if step.phase == types.Phase.ANSWER and phrase:
            text = tail + step.text
            if phrase in text:
                actions.append(types.Action_Stop(f"the answer contains `{phrase}`"))
            tail = text[-len(phrase) :]
        return actions


class OnToolCall(exports.OnToolCall):
    @reporting
    def on_tool_call(self, call: types.ToolCallView) -> types.Verdict:
        for earlier in call.earlier:
            same = earlier.name == call.name and earlier.arguments == call.digest
            if same and earlier.answered is not None:
                return types.Verdict_Repair("I have that result already: ")
        return types.Verdict_Accept()
