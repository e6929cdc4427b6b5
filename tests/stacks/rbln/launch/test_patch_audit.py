"""A patch that does anything but log is refused, and the refusal names the line."""

from __future__ import annotations

import pytest

from harness.stacks.rbln.launch.patch_audit import PatchAuditError, audit

BEFORE = '''\
"""A module."""
import logging

logger = logging.getLogger(__name__)


class Model:
    """A class."""

    @property
    def size(self):
        return 1

    def choose(self, rows, buckets):
        """Choose."""
        n = rows.shape[0]
        if n > 1:
            b = min(x for x in buckets if x >= n)
        else:
            b = 1
        if n > 7:
            late = 1
        return n, b
'''
PLACE = "        return n, b\n"
GOOD = '        logger.debug("[BUCKET] n=%d b=%d", n, b)\n'


def _added(line: str, place: str = PLACE) -> str:
    assert BEFORE.count(place) == 1
    return BEFORE.replace(place, f"{line}{place}")


@pytest.mark.parametrize(
    "line",
    [
        GOOD,
        '        logger.debug("a plain line")\n',
        '        logger.info("100%% of %d", b)\n',
        '        logger.debug("%d", 0 if rows is None else rows.shape[0])\n',
    ],
)
def test_a_logging_call_with_harmless_arguments_passes(line: str) -> None:
    (added,) = audit(BEFORE, _added(line), where="p")
    assert added.line == 23
    assert added.format in line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('        logger.debug(f"{self.close()}")\n', "constant format"),
        ('        logger.debug(f"{n}")\n', "constant format"),
        ('        logger.debug("%d" % self.close())\n', "constant format"),
        ('        logger.debug("%d", self.close())\n', "may run code"),
        ('        logger.debug("%d", (n := 3))\n', "may run code"),
        ('        logger.debug("%d", [n for n in rows][0])\n', "may run code"),
        ('        logger.debug("%d", rows[0])\n', "may run code"),
        ('        logger.debug("%d", self.size)\n', "may run code"),
        ('        logger.debug("%d", n / b)\n', "may run code"),
        ('        logger.debug("%d", (yield))\n', "may run code"),
        ('        logger.debug("%d", rows.shape[0])\n', "may run code or fail"),
        ('        logger.debug("%d", 0 if rows is not None else rows.shape[0])\n', "may run code or fail"),
        ('        logger.debug("%d", 0 if buckets is None else rows.shape[0])\n', "may run code or fail"),
        ('        logger.debug("%d", 0 if self.close() is None else 1)\n', "may run code"),
        ('        logger.debug("%d", late)\n', "may not be bound"),
        ('        logger.debug("%d", elsewhere)\n', "may not be bound"),
        ('        logger.debug("%d", "text")\n', "evaluates \"'text'\""),
        ('        logger.debug("%s", n)\n', "other than %d"),
        ('        logger.debug("%r %d", n, b)\n', "other than %d"),
        ('        logger.debug("%(n)d", n)\n', "other than %d"),
        ('        logger.debug("%d")\n', "a different number of %d"),
        ('        logger.debug("%d", *rows)\n', "may run code"),
        ('        logger.debug("%d", n, exc_info=True)\n', "keyword arguments"),
        ('        logger.debug("%d", n, **rows)\n', "keyword arguments"),
        ('        logger.exception("x")\n', "adds or changes"),
        ("        logger.setLevel(10)\n", "adds or changes"),
        ('        self.logger.debug("x")\n', "adds or changes"),
        ('        print("x")\n', "adds or changes"),
        ("        n = 3\n", "adds or changes"),
        ("        n += 1\n", "adds or changes"),
        ("        del n\n", "adds or changes"),
        ("        import os\n", "adds or changes"),
        ("        global n\n", "adds or changes"),
        ('        if n:\n            logger.debug("%d", n)\n', "adds or changes"),
        ('        try:\n            logger.debug("%d", n)\n        finally:\n            pass\n', "adds or changes"),
        ("        pass\n", "adds or changes"),
    ],
)
def test_a_line_that_could_do_more_is_refused_by_its_number(line: str, reason: str) -> None:
    with pytest.raises(PatchAuditError) as refusal:
        audit(BEFORE, _added(line), where="some.patch")
    assert reason in str(refusal.value)
    assert "some.patch line 23" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        ("        if n > 1:\n", "        if n > 2:\n", 17),
        ("        if n > 1:\n", "        if n >= 1:\n", 17),
        ("    def choose(self, rows, buckets):\n", "    def choose(self, rows, buckets=()):\n", 14),
        ("    def choose(self, rows, buckets):\n", "    @staticmethod\n    def choose(self, rows, buckets):\n", 14),
        ("    @property\n", "", 10),
        ("class Model:\n", "class Model(dict):\n", 7),
        ("            b = 1\n", "            b = True\n", 20),
        ("            b = 1\n", "            b = 1.0\n", 20),
        ("        return n, b\n", "        return b, n\n", 23),
        ('"""A module."""\n', '"""Another module."""\n', 1),
    ],
)
def test_a_change_beside_a_good_line_is_refused(old: str, new: str, number: int) -> None:
    assert BEFORE.count(old) == 1
    after = _added(GOOD, place="        if n > 7:\n").replace(old, new)
    with pytest.raises(PatchAuditError, match=rf"line {number}: |line {number + 1}: "):
        audit(BEFORE, after, where="p")


@pytest.mark.parametrize("gone", ["            late = 1\n        return n, b\n", "        n = rows.shape[0]\n"])
def test_a_deleted_line_is_refused_by_its_old_number(gone: str) -> None:
    after = _added(GOOD, place="        if n > 7:\n").replace(gone, "            late = 1\n" if "late" in gone else "")
    with pytest.raises(PatchAuditError, match=r"deletes or moves|adds or changes"):
        audit(BEFORE, after, where="p")


IMPORTS = "import logging\n\nlogger = logging.getLogger(__name__)\n"


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (BEFORE.replace(IMPORTS, "\n".join(IMPORTS.split("\n\n")[::-1])), "line 2"),
        (_added('        else:\n            logger.debug("%d", n)\n'), "adds or changes"),
        (_added('logger.debug("x")\n', "class Model:\n"), "outside any function"),
        (_added('    logger.debug("x")\n', "    @property\n"), "outside any function"),
        (_added('        logger.debug("x")\n', '        """Choose."""\n'), "before a docstring"),
        (BEFORE + "# more\n", "adds no logging call"),
        ("def (:\n", "line 1 is not Python"),
        (BEFORE + "\0", "is not Python"),
        (f"x = {'-' * 3_000}1\n", "nested too deeply"),
        (f"x = {'-' * 100_000}1\n", "nested too deeply"),
    ],
    ids=[
        *("swapped lines", "a branch that only logs", "at import", "in the body of a class", "before a docstring"),
        *("comments alone", "no Python", "a null byte", "nested deeply", "nested without end"),
    ],
)
def test_what_is_more_than_a_log_line_in_a_function_is_refused(after: str, message: str) -> None:
    with pytest.raises(PatchAuditError, match=message):
        audit(BEFORE, after, where="p")


@pytest.mark.parametrize(
    "shadow",
    [
        ("    def choose(self, rows, buckets):\n", "    def choose(self, rows, logger):\n"),
        ("        if n > 7:\n            late = 1\n", "        if n > 7:\n            logger = self\n"),
        ("logger = logging.getLogger(__name__)\n", "logger = Mine()\n"),
        ("import logging\n", "import logging\nfrom mine import logger\n"),
    ],
)
def test_a_logger_that_is_not_the_modules_own_is_refused(shadow: tuple[str, str]) -> None:
    before = BEFORE.replace(*shadow)
    with pytest.raises(PatchAuditError, match="not the module's only logger"):
        audit(before, before.replace(PLACE, f"{GOOD}{PLACE}"), where="p")
