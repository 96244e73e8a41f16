"""The pictures show what happened: every span, every phase, every turn."""

import pytest

from fa3.pipeline import draw
from fa3.pipeline.model import play, ring_machine, turns_machine
from fa3.pipeline.model.steps import Bring, Done
from tests.unit.pipeline.rings import ring
from tests.unit.test_package import python

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _no_window():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def timeline(stages=2, items=4):
    lengths = {Bring: 2.0, Done: 3.0}
    machine = ring_machine(ring(stages=stages, bytes=32), items)
    return play(machine, lambda actor, step: lengths.get(type(step), 0.0))


def test_importing_the_pictures_imports_no_matplotlib():
    assert (
        python("import sys, fa3.pipeline.draw; print('matplotlib' in sys.modules, 'cutlass' in sys.modules)")
        == "False False"
    )


@pytest.mark.parametrize("stages", (1, 2, 3))
def test_stages(stages):
    ax = draw.stages(timeline(stages), "k")
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"k[{i}]" for i in range(stages)]
    shown = [text.get_text() for text in ax.texts]
    assert {int(text) for text in shown} == {0, 1, 2, 3}
    covered = sum(bar.get_width() for bar in ax.patches)
    assert covered == pytest.approx(stages * timeline(stages).end), "the spans of a stage cover all of the time"


def test_phases():
    ax = draw.phases(timeline(stages=2, items=4), "k")
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "k.full[0]",
        "k.empty[0]",
        "k.full[1]",
        "k.empty[1]",
    ]
    assert {text.get_text() for text in ax.texts} <= {"0", "1", "2"}
    assert draw.phases(timeline(), "k", ax=ax) is ax


def test_work():
    played = play(turns_machine((3, 3)), lambda actor, step: 2.0 if step.label else 0.0)
    ax = draw.work(played, ("gemm", "softmax"), until=20)
    assert len(ax.patches) == 2 * 3 * 2
    assert ax.get_xlim() == (0, 20)


def test_spans_leave_nothing_out():
    played = timeline(stages=1, items=2)
    found = list(draw.spans(played, lambda state: state.things["k[0]"].owner))
    assert [what for _, _, what in found] == ["filling", "reading", "filling", "reading"]
    assert [begin for begin, _, _ in found[1:]] == [end for _, end, _ in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0.0, played.end)


def test_an_unknown_edge():
    with pytest.raises(KeyError, match="no edge 'v'"):
        draw.stages(timeline(), "v")
