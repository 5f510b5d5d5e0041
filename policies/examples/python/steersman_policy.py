"""What policies in Python have in common: plans with defaults, and failures that say what went wrong."""

from wit_world.imports import failure, types


def Plan(**fields):
    """A plan with these fields, `Plan(every=8)`; all other choices are the engine's."""
    defaults = dict(
        reasoning=None,
        reasoning_budget=None,
        answer_reserve=None,
        sampling=types.SamplingPatch(None, None, None, None),
        loops=None,
        every=0,
        checkpoint_every=0,
        note=None,
        retain=None,
        form=None,
        refuse=None,
        max_tokens=None,
        stop=[],
        tools=None,
        on_phase=False,
        on_newline=False,
        on_texts=[],
        on_tokens=[],
        candidates=0,
        route=None,
        limit_counts=None,
        watch=[],
    )
    return types.Plan(**{**defaults, **fields})


def reporting(hook):
    """Wraps a hook so that its exceptions appear in notes and log; otherwise they are reported as a trap."""

    def wrapped(self, call):
        try:
            return hook(self, call)
        except Exception as error:
            # The line in the hook, not in this wrapper.
            place = error.__traceback__.tb_next or error.__traceback__
            failure.fail(f"line {place.tb_lineno}: {error!r}")

    return wrapped
