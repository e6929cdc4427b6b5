"""The page about the signs of Tables I and II: every number on it is computed when it is written.

Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

import numpy as np

from harness.paper.signs import (
    ALTERNATIVES,
    BASE_SEED,
    GRID,
    PLANS_IN_A_SUM,
    SHIPPED,
    TABLE_I,
    TABLE_II,
    WIDER_GRID,
    Draws,
    SignRow,
    Variant,
    draw,
    draw_published,
    reversal_share,
    share_by_decode_ratio,
    sign_row,
)
from harness.processes import side_by_side

DEFAULT_SUMS = 400
WIDTH = 118
# Alternatives are compared among themselves: a quarter of the sums tells them apart.
ALTERNATIVE_PART = 4
AT_THE_EDGE = 0.01


class _Facts(NamedTuple):
    draws: dict[int, Draws]
    rows: list[SignRow]
    single: list[SignRow]


Draw = tuple[str, tuple[int, ...]]
"""A variant's name and the buckets."""


def page(num_sums: int = DEFAULT_SUMS, tell: Callable[[float], None] = lambda _share: None) -> str:
    """The whole page as Markdown; num_sums: sums of three plans per N. tell: takes the share of the plans drawn."""
    # A small N tells whether sharing is worth it; then those of most sessions, so that the last is a short one.
    first, *others = sorted(TABLE_I)
    users = [first, *reversed(others)]
    num_drawn = 0

    def on_told(sessions: int) -> None:
        nonlocal num_drawn
        num_drawn += sessions
        tell(num_drawn / sum(users))

    found = dict(side_by_side(lambda each, tell: _draws(each, num_sums, tell), users, on_told))
    draws = {each: found[users.index(each)] for each in TABLE_I}
    return "\n".join(_parts(num_sums, max(2, num_sums // ALTERNATIVE_PART), draws)) + "\n"


def _draws(users: int, num_sums: int, tell: Callable[[int], None]) -> dict[Draw, Draws]:
    """Everything that the page draws of one N."""
    num_plans = num_sums * PLANS_IN_A_SUM
    num_others = max(2, num_sums // ALTERNATIVE_PART) * PLANS_IN_A_SUM
    found = {(SHIPPED.name, GRID): draw(users, num_plans)}
    found |= {(SHIPPED.name, grid): draw(users, num_plans, buckets=grid) for n, grid in TABLE_II if n == users}
    found |= {(variant.name, GRID): draw(users, num_others, variant) for variant in ALTERNATIVES}
    tell(users)
    return found


def _parts(num_sums: int, num_others: int, found: Mapping[int, Mapping[Draw, Draws]]) -> Iterator[str]:
    num_plans = num_sums * PLANS_IN_A_SUM
    draws = {users: of_users[SHIPPED.name, GRID] for users, of_users in found.items()}
    rows = [sign_row(users, one) for users, one in draws.items()]
    single = [sign_row(users, one.grouped(1)) for users, one in draws.items()]
    facts = _Facts(draws, rows, single)
    yield _head(num_sums, num_plans)
    yield from _table_i(facts)
    yield from _verdict(facts)
    yield from _four(facts)
    yield from _alternatives(num_others, found)
    yield from _published()
    yield from _table_ii(found)


def _said(text: str, bullet: str = "") -> str:
    """A paragraph of the page: white space as it comes out, lines of at most WIDTH."""
    words = bullet + " ".join(text.split())
    return fill(words, WIDTH, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False)


def _head(num_sums: int, num_plans: int) -> str:
    made = f"""Written by `harness signs -o docs/table-signs.md`; do not edit. **Simulated, nothing is measured.**
        {num_plans:,} plans per N of the shipped experiment `alignment` (base seed {BASE_SEED}), each with its waits and
        without; buckets {{1,2,4,8}}, limit and slots 8, rules vendor-0.11.1, cost model `paper`. As in the paper, one
        figure is a sum of three plans (its rows of N = 3 and 7: of six): numerators and denominators are summed, then
        divided. That makes {num_sums:,} figures per N, of which no two share a plan."""
    words = """`delta p = p_C - p_A`: above 0, waits lower the padding. *Share*: of the figures with the printed sign.
        *At*: share of the figures at or below the printed value; near 0 or 1, three plans hardly give that value.
        Interval: 95 % percentile bootstrap of the pooled delta p over plans, 2,000 resamples, seed 20261121."""
    title = "# The signs of Tables I and II over many drawn plans"
    return f"{title}\n\n{_said(made)}\n\n{_said(words)}\n\n## Table I\n"


def _table_i(facts: _Facts) -> Iterator[str]:
    columns = ("N", "printed delta p", "all plans: p_A", "p_C", "delta p", "interval", "share", "at")
    columns += ("printed decode ratio", "all plans", "least - largest", "at")
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in facts.rows:
        printed = TABLE_I[row.users]
        low, high = row.interval
        yield (
            f"| {row.users} | {printed.delta_p:+.3f} | {row.p_a:.3f} | {row.p_c:.3f} | {row.delta_p:+.4f} | "
            f"{low:+.4f} to {high:+.4f} | {row.share:.0%} | {row.at_delta_p:.3f} | {printed.decode_ratio:.2f} | "
            f"{row.decode_ratio:.2f} | {row.least_ratio:.2f} - {row.largest_ratio:.2f} | {row.at_ratio:.3f} |"
        )


def _verdict(facts: _Facts) -> Iterator[str]:
    rows = facts.rows
    told = [row for row in rows if row.is_told]
    same = [row for row in told if np.sign(row.delta_p) == np.sign(TABLE_I[row.users].delta_p)]
    opposite = [row for row in told if row not in same]
    neither = [row for row in rows if not row.is_told]
    whole = float(np.prod([row.share for row in rows]))
    ratios = np.concatenate([one.sums_decode_ratio() for one in facts.draws.values()])
    yield ""
    yield _said(
        f"""All plans together have the printed sign at N = {_users(same)}, the opposite one at N = {_users(opposite)},
        and none at N = {_users(neither)}.""",
        "- ",
    )
    yield _said(
        f"""Three plans per N have all nine printed signs in {whole:.1%} of tables (product of the shares: each N has
        plans of its own).""",
        "- ",
    )
    yield _said(
        f"""The decode time ratio is above 1 in {np.mean(ratios > 1):.2%} of the {len(ratios):,} figures; the least is
        {ratios.min():.3f}.""",
        "- ",
    )
    names = ("at_delta_p", "at_ratio", "at_p_c")
    of_sums, of_single = ([_users(_edge(some, name)) for name in names] for some in (rows, facts.single))
    yield _said(
        f"""Among sums of three plans, the printed delta p is in an outermost {AT_THE_EDGE:.0%} at N = {of_sums[0]}, the
        printed decode ratio at N = {of_sums[1]}, the printed p_C, which lengths alone decide up to N = 8, at N =
        {of_sums[2]}. Among **single plans** they are so at N = {"; ".join(of_single)}: the printed table scatters about
        as single plans do. It is mostly the waits of its plans that are unusual for the shipped mixture. The seeds
        behind Table I are not published. Those of the later validations are, and give their printed predictions to the
        digit ([paper-rules.md](paper-rules.md)).""",
        "- ",
    )
    yield ""


def _edge(rows: Sequence[SignRow], name: str) -> list[SignRow]:
    return [row for row in rows if not AT_THE_EDGE < getattr(row, name) < 1 - AT_THE_EDGE]


def _users(rows: Sequence[SignRow]) -> str:
    return ", ".join(str(row.users) for row in rows) or "none"


def _four(facts: _Facts) -> Iterator[str]:
    single, printed = facts.draws[4].grouped(1), TABLE_I[4]
    yield "### N = 4\n"
    yield _said(
        f"""4 is in the grid: as at N = 8, most draws of waits take steps off it, so the padding grows. The longer the
        waits, the more often a request decodes alone, which fills its bucket, and the more often the sign turns. The
        printed decode ratio of {printed.decode_ratio} belongs there (all second requests alone: about 1.9)."""
    )
    yield "\n| single plans with a decode ratio of | share with delta p > 0 |\n|---|---|"
    for least, largest, share in share_by_decode_ratio(single):
        yield f"| {least:.2f} - {largest:.2f} | {share:.0%} |"
    near = single.sums_decode_ratio() >= printed.decode_ratio
    if near.any():
        share = float(np.mean(single.sums_delta_p()[near] > 0))
        yield f"| at least {printed.decode_ratio} ({int(near.sum()):,} of {single.num_plans:,}) | {share:.0%} |"
    yield ""


def _alternatives(num_sums: int, draws: Mapping[int, Mapping[Draw, Draws]]) -> Iterator[str]:
    yield "## Is it the model?\n"
    yield _said(
        f"""The same with one thing changed, {num_sums} figures each: pooled delta p by N, **bold** where its sign is
        not the printed one."""
    )
    yield f"\n| changed | {' | '.join(f'N={users}' for users in TABLE_I)} | decode ratios |"
    yield "|" + "---|" * (len(TABLE_I) + 2)
    found = {
        variant.name: {users: of_users[variant.name, GRID].first(num_sums) for users, of_users in draws.items()}
        for variant in (SHIPPED, *ALTERNATIVES)
    }
    for variant in (SHIPPED, *ALTERNATIVES):
        yield _alternative_row(variant, found[variant.name])
    turned = [name for name, by_users in found.items() if by_users[4].delta_p > 0]
    told = f"Only {', '.join(turned)} gives" if turned else "None of these gives"
    yield ""
    yield _said(
        f"""{told} the printed sign at N = 4. KV rules matter from N = 8 on, where slots run out; below, they change
        prefills and hardly who decodes with whom."""
    )
    yield ""


def _published() -> Iterator[str]:
    yield _said(
        """The plans of the paper whose seeds are published (search, evaluation, validation, saturation; N = 6, 8, 10)
        scatter in the same way. They are other plans than those of Table I:"""
    )
    yield "\n| N | sums of three | delta p of each | with the sign of Table I | decode ratios |\n|---|---|---|---|---|"
    for users in (6, 8, 10):
        found = draw_published(users)
        delta_p = [one.delta_p for one in found]
        same = sum(np.sign(value) == np.sign(TABLE_I[users].delta_p) for value in delta_p)
        ratios = [one.decode_ratio for one in found]
        each = " ".join(f"{value:+.3f}" for value in delta_p)
        yield f"| {users} | {len(found)} | {each} | {same} | {min(ratios):.2f} - {max(ratios):.2f} |"
    yield ""


def _alternative_row(variant: Variant, found: dict[int, Draws]) -> str:
    cells: list[str] = []
    for users, draws in found.items():
        is_same = np.sign(draws.delta_p) == np.sign(TABLE_I[users].delta_p)
        cells.append(f"{draws.delta_p:+.3f}" if is_same else f"**{draws.delta_p:+.3f}**")
    ratios = [draws.decode_ratio for draws in found.values()]
    return f"| {variant.name}: {variant.meaning} | {' | '.join(cells)} | {min(ratios):.2f} - {max(ratios):.2f} |"


def _table_ii(drawn: Mapping[int, Mapping[Draw, Draws]]) -> Iterator[str]:
    yield """\
## Table II

At N = 8 the paper prints only that delta p is below 0 on both grids.

| N | grid | printed | all plans: p_A | p_C | delta p | interval | share of sums with that sign |
|---|---|---|---|---|---|---|---|"""
    found = {(users, grid): drawn[users][SHIPPED.name, grid] for users, grid in TABLE_II}
    for (users, grid), draws in found.items():
        printed = TABLE_II[users, grid]
        low, high = draws.delta_p_interval()
        p_a, p_c = draws.pooled_p()
        is_below = printed is None
        share = float(np.mean(np.sign(draws.sums_delta_p()) == np.sign(-1 if is_below else printed)))
        shown = "< 0" if is_below else f"{printed:+.3f}"
        yield (
            f"| {users} | {{{','.join(map(str, grid))}}} | {shown} | {p_a:.3f} | {p_c:.3f} | {draws.delta_p:+.4f} | "
            f"{low:+.4f} to {high:+.4f} | {share:.0%} |"
        )
    own, wider = found[6, GRID], found[6, WIDER_GRID]
    is_reversed = float(np.mean((own.sums_delta_p() > 0) & (wider.sums_delta_p() < 0)))
    yield ""
    yield _said(
        f"""The reversal at N = 6 (above 0 without bucket 6, below 0 with it) holds for all plans together and in
        {is_reversed:.0%} of the sums; in each of the three plans, as the paper reports of its own, in
        {reversal_share(own, wider):.0%} of them."""
    )
