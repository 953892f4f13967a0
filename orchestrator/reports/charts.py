"""The figures of a report, drawn by plotly (imported with the first one). Names and values are untrusted text."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.trainer.errors import ConfigError

from .html import Html

# More than a screen has columns.
_MOST_POINTS = 2000
_COLORS = ("#0969da", "#d9480f", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#1b7c83", "#57606a")
_GREY = "#c4ccd4"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


ZOOM = """
if (matchMedia("(hover: hover)").matches)
  for (const figure of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(figure, {dragmode: "zoom"});
"""
"""Has figures zoom where there is a mouse; for the end of a page."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a figure.

    Attributes:
        name: for the legend.
        x, y: its points; those that are not finite are left out.
        color: of the line, by default that of its place.
        width: of the line, in pixels; 0 for markers alone.
        markers: whether its points are marked: they are few.
        step: whether a value holds until the next one.
        texts: what is told of each point besides.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str | None = None
    width: float = 1.8
    markers: bool = False
    step: bool = False
    texts: Sequence[str] = field(default_factory=tuple)

    @property
    def points(self) -> list[tuple[float, float, str]]:
        """What of it can be drawn."""
        texts = self.texts or [""] * len(self.x)
        return [
            (x, y, text)
            for x, y, text in zip(self.x, self.y, texts, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]


def library() -> str:
    """Return plotly's JavaScript, about 4.8 MB, for a page to have once.

    Raises:
        ConfigError: plotly is not installed.
    """
    _plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def curves(
    title: str, lines: Sequence[Line], *, x_title: str = "step", marks: Sequence[float] = (), legend: bool = True
) -> Html:
    """Draw curves over one axis; nothing if no point of them is finite.

    Args:
        title: of the figure.
        lines: of which those that follow lie above.
        x_title: what the axis counts.
        marks: where vertical lines go, as at the beginning of an attempt.
        legend: whether the names are shown, where there are several.
    """
    drawn = [(line, points) for line in lines if (points := line.points)]
    if not drawn:
        return Html("")
    go = _plotly()
    figure = go.Figure()
    for index, (line, points) in enumerate(drawn):
        color = line.color or _COLORS[index % len(_COLORS)]
        steps, values, texts = zip(*_thinned(points), strict=True)
        # A single point has no line.
        mode = "markers" if not line.width or len(points) == 1 else "lines+markers" if line.markers else "lines"
        told = "<br>%{text}" if line.texts else ""
        figure.add_trace(
            go.Scatter(
                x=steps, y=values, name=_label(line.name), mode=mode,
                line={"color": color, "width": line.width or 1, "shape": "hv" if line.step else "linear"},
                marker={"color": color, "size": 6}, text=[_label(each) for each in texts] if line.texts else None,
                hovertemplate=f"%{{y:.5g}} at {_label(x_title)} %{{x:,}}{told}",
            )
        )  # fmt: skip
    for mark in marks:
        figure.add_vline(x=mark, line={"color": _GREY, "width": 1, "dash": "dot"})
    figure.update_layout(showlegend=legend and len(drawn) > 1)
    figure.update_xaxes(title={"text": _label(x_title), "standoff": 6})
    x = [point[0] for _, points in drawn for point in points]
    if max(x) - min(x) <= 10:
        # There is no step between two.
        figure.update_xaxes(dtick=1)
    y = {point[1] for _, points in drawn for point in points}
    if len(y) == 1 and y != {0.0}:
        # Left to plotly, a constant of 0.003 lies between -1 and 1.
        figure.update_yaxes(range=sorted([0, 2 * y.pop()]))
    return _drawn(figure, title, height=270)


def bar(title: str, parts: Mapping[str, float], colors: Mapping[str, str]) -> Html:
    """Draw one bar whose parts add up to its length.

    Args:
        title: of the figure.
        parts: seconds by name, none of them negative.
        colors: of the parts.
    """
    total = sum(parts.values())
    if total <= 0:
        return Html("")
    go = _plotly()
    figure = go.Figure()
    for name, seconds in parts.items():
        if seconds >= 0.0005 * total:
            figure.add_trace(
                go.Bar(
                    x=[seconds], y=[""], orientation="h", name=_label(name), marker={"color": colors[name]},
                    hovertemplate=f"{100 * seconds / total:.1f} %, {seconds:,.1f} s",
                )
            )  # fmt: skip
    figure.update_layout(barmode="stack", showlegend=True, legend={"traceorder": "normal"})
    figure.update_xaxes(title={"text": "seconds", "standoff": 6})
    figure.update_yaxes(showticklabels=False)
    return _drawn(figure, title, height=210)


def parallel_coordinates(
    title: str, axes: Mapping[str, Sequence[Any]], *, names: Sequence[str], worth: Sequence[float]
) -> Html:
    """Draw one line for each trial through what it tried, by lines of SVG: plotly's own figure needs WebGL.

    An axis is logarithmic where its values are positive and far apart, and one of places where they are no numbers.

    Args:
        title: of the figure.
        axes: by name, a value for each trial.
        names: of the trials.
        worth: of each trial, from 0 for the worst to 1 for the best; the best lies above.
    """
    if not names:
        return Html("")
    go = _plotly()
    from plotly.colors import sample_colorscale

    scales = {name: _Scale.of(values) for name, values in axes.items()}
    figure = go.Figure()
    labels = [_label(name) for name in axes]
    places = list(range(len(axes)))
    for index in sorted(range(len(names)), key=lambda each: worth[each]):
        told = "<br>".join(f"{_label(name)}: {_label(shown(values[index]))}" for name, values in axes.items())
        color = sample_colorscale("Viridis_r", [0.15 + 0.85 * worth[index]])[0]
        figure.add_trace(
            go.Scatter(
                x=places, y=[scales[name].place(values[index]) for name, values in axes.items()], mode="lines+markers",
                line={"color": color, "width": 3.5 if worth[index] == 1 else 1.6}, marker={"color": color, "size": 5},
                name=_label(names[index]), text=[told] * len(axes), hovertemplate="%{text}",
            )
        )  # fmt: skip
    for place, name in zip(places, axes, strict=True):
        figure.add_vline(x=place, line={"color": _GREY, "width": 1}, layer="below")
        for at, text in scales[name].ticks:
            figure.add_annotation(
                x=place, y=at, text=_label(text), showarrow=False, xanchor="left", xshift=4, font={"size": 11},
                bgcolor="rgba(255,255,255,0.92)", borderpad=1,
            )  # fmt: skip
    figure.update_layout(showlegend=False, hovermode="closest")
    figure.update_xaxes(tickvals=places, ticktext=labels, showgrid=False, range=[-0.15, len(axes) - 0.55])
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return _drawn(figure, title, height=360)


def shown(value: Any) -> str:
    """Return a value as people read it: a number in at most five digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Scale:
    """Where values lie on an axis from 0 to 1.

    Attributes:
        at: places of values: of numbers by themselves (1 and 1.0 are one, so are 0.0 and -0.0), of others by text.
        ticks: place and text.
        numeric: whether they are numbers.
    """

    at: dict[Any, float]
    ticks: list[tuple[float, str]]
    numeric: bool

    @classmethod
    def of(cls, values: Sequence[Any]) -> _Scale:
        numeric = all(type(each) in (int, float) and math.isfinite(each) for each in values)
        distinct: list[Any] = sorted(set(values)) if numeric else sorted({str(each) for each in values})
        if not numeric or len(distinct) <= 2:
            last = max(len(distinct) - 1, 1)
            at = {each: index / last if len(distinct) > 1 else 0.5 for index, each in enumerate(distinct)}
            return cls(at, [(at[each], shown(each)[:24]) for each in distinct[:: -(-len(distinct) // 12)]], numeric)
        is_wide = distinct[0] > 0 and distinct[-1] / distinct[0] >= 30
        scale = math.log10 if is_wide else float
        low, high = scale(distinct[0]), scale(distinct[-1])
        at = {each: (scale(each) - low) / (high - low) for each in distinct}
        if len(distinct) <= 6:
            ticks: list[tuple[float, str]] = []
            for each in distinct:
                # Text that lies on other text is not read.
                if not ticks or at[each] - ticks[-1][0] > 0.05:
                    ticks.append((at[each], f"{each:.3g}"))
            return cls(at, ticks, numeric)
        middles = [low + (high - low) * part / 4 for part in range(5)]
        ticks = [((each - low) / (high - low), f"{10**each if is_wide else each:.3g}") for each in middles]
        return cls(at, ticks, numeric)

    def place(self, value: Any) -> float:
        return self.at[value if self.numeric else str(value)]


def _plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(
            f"a report is drawn by plotly, which cannot be imported ({error}): pip install 'headway[report]'"
        ) from error
    return go


def _drawn(figure: Any, title: str, *, height: int) -> Html:
    import plotly.graph_objects as go

    figure.update_layout(
        # Plotly's default one would be in the file once for each figure.
        template=go.layout.Template(), height=height, margin={"l": 56, "r": 12, "t": 8, "b": 40}, autosize=True,
        paper_bgcolor="#fff", plot_bgcolor="#fff", font={"family": _FONT, "size": 12, "color": "#1b1f24"},
        # Dragging keeps a finger from scrolling: `ZOOM` has it zoom where there is a mouse.
        dragmode=False, hoverlabel={"namelength": 40},
    )  # fmt: skip
    if figure.layout.showlegend:
        figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, margin={"t": 30})
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(gridcolor="#eef1f4", zeroline=False, linecolor=_GREY, automargin=True)
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, default_width="100%", default_height=f"{height}px",
        config={"responsive": True, "displayModeBar": False},
    )  # fmt: skip
    return Html(f'<figure class="figure"><h3>{html.escape(title)}</h3>\n{drawn}\n</figure>')


def _label(text: str) -> str:
    """Text for plotly, which takes some tags for markup."""
    return html.escape(text).replace("%{", "% {")


def _thinned(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """At most so many points that a line looks the same: of each stretch the lowest and the highest."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // _MOST_POINTS)
    kept = []
    for begin in range(0, len(points), size):
        stretch = list(enumerate(points[begin : begin + size], begin))
        ends = {min(stretch, key=lambda each: each[1][1])[0], max(stretch, key=lambda each: each[1][1])[0]}
        kept += [points[index] for index in sorted(ends)]
    return [points[0], *kept, points[-1]]
