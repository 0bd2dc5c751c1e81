"""Which pass has made a program wrong: plan again, and compare the program behind each pass.

Up to `localize` a program has global shapes, so one device evaluates it. Then the devices do.
"""

from __future__ import annotations

from itertools import takewhile

from ...compiler.plan import Plan
from ...errors import ShardingError
from ...fx_passes.pass_runner import observing
from ...fx_passes.program import Program
from ...fx_passes.stages import LOCAL
from .certificate import TRIALS
from .trial import NoNumbers, Trial


def blamed(plan: Plan, error: ShardingError) -> ShardingError:
    """Add to a plan's error the pass that made it wrong, if planning again shows it.

    A plan from a file has no passes: its error stays as it is. A pass is named if its program and
    all later ones are wrong: between `localize` and `outline_loops` a pipeline with several rounds
    runs in another order than the devices will.
    """
    if plan._replanner is None:
        return error
    found = list[tuple[str, ShardingError | None]]()
    with observing(lambda name, program: found.append((name, _difference(program)))):
        plan._replanner()(plan.captured)
    wrong = [*takewhile(lambda row: row[1] is not None, reversed(found))]
    if not wrong or (first := wrong[-1][1]) is None:
        return error
    made = f"pass {wrong[-1][0]} made it so: the program before it is right"
    return ShardingError(first.what, where=first.where, why=f"{made}; {first.why}", fix=first.fix)


def _difference(program: Program) -> ShardingError | None:
    """Return the error of a program that computes other values than one device."""
    is_local = program.stage >= LOCAL
    graph = program.sharded if is_local else program.graph
    plan = Plan(program.mesh, program.captured, graph, program.graph, None, {})
    for seed, positive in TRIALS:
        for wide in (True, False):
            try:
                trial = Trial(plan, seed, positive, wide)
                if is_local:
                    trial.run(program.graph)
            except NoNumbers:
                continue
            except ShardingError as error:
                return error
            break
    return None
