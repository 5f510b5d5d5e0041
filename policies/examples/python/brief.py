"""Keeps replies brief: short thoughts, an answer that ends at a phrase, a token that is never drawn, no tool called
twice for the same.

One instance lives as long as one request, so these globals are that request's state.
"""

from wit_world import exports
from wit_world.imports import failure, types

budget = 100  # most tokens of a thought: the parameter `budget`
phrase = ""  # the answer ends where it says this: the parameter `phrase`
ban = None  # a token that is not drawn, from the first step on: the parameter `ban`
tail = ""  # the end of the answer so far, in which a phrase may have begun


def told(hook):
    """A hook whose exceptions are told in notes and log; without this a failure is a bare trap."""

    def wrapped(self, asked):
        try:
            return hook(self, asked)
        except Exception as error:
            failure.fail(f"line {error.__traceback__.tb_next.tb_lineno}: {error!r}")

    return wrapped


def number(params, name, notes):
    """Whole numbers of up to nine digits; what else a parameter says is told in the reply's notes."""
    text = params.get(name)
    if text is None:
        return None
    if 1 <= len(text) <= 9 and all(digit in "0123456789" for digit in text):
        return int(text)
    notes.append(f"parameter `{name}` cannot be `{text}`")
    return None


class OnRequest(exports.OnRequest):
    @told
    def on_request(self, request: types.Request) -> types.Plan:
        global budget, phrase, ban
        params = dict(request.params)
        notes = []
        wish = number(params, "budget", notes)
        if wish is not None:
            budget = wish
        if request.think_budget is not None:
            budget = min(budget, request.think_budget)
        ban = number(params, "ban", notes)
        phrase = params.get("phrase", "")
        return types.Plan(
            thinking=request.thinking,
            think_budget=budget,
            answer_reserve=None,
            sampling=types.Sampling(None, None, None, None),
            loops=None,
            every=8,
            checkpoint_every=0,
            note="; ".join(notes) or None,
            keep=None,
        )


class OnStep(exports.OnStep):
    @told
    def on_step(self, step: types.Step) -> list[types.Action]:
        global ban, tail
        actions = []
        if ban is not None:
            actions.append(types.Action_Ban(types.Ban(tokens=[ban], steps=0)))
            ban = None  # once is enough: it holds for the rest of the reply
        thinks = step.phase == types.Phase.THINK
        if thinks and (step.budget_reached or step.think_tokens >= budget):
            actions.append(types.Action_CloseThinking("In short: "))
        if step.phase == types.Phase.ANSWER and phrase:
            text = tail + step.text
            if phrase in text:
                actions.append(types.Action_Stop(f"the answer says `{phrase}`"))
            tail = text[-len(phrase) :]
        return actions


class OnToolCall(exports.OnToolCall):
    @told
    def on_tool_call(self, call: types.ToolCall) -> types.Verdict:
        for earlier in call.earlier:
            same = earlier.name == call.name and earlier.arguments == call.digest
            if same and earlier.answered is not None:
                return types.Verdict_Repair("I have that result already: ")
        return types.Verdict_Accept()
