"""The figures of a report, drawn by plotly, which is imported on first use. Names and values are untrusted text."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.trainer.errors import ConfigError

from .html import Html

# More than the columns of a screen.
_MOST_POINTS = 2000
_COLORS = ("#0969da", "#d9480f", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#1b7c83", "#57606a")
_GREY = "#c4ccd4"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


ZOOM = """
if (matchMedia("(hover: hover)").matches)
  for (const figure of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(figure, {dragmode: "zoom"});
"""
"""JavaScript for the end of a page: enables zooming by dragging if there is a mouse."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a figure.

    Attributes:
        name: shown in the legend.
        x, y: coordinates of its points; non-finite ones are left out.
        color: by default the color of its position in the figure.
        width: in pixels; 0 for markers only.
        markers: whether to mark its points.
        step: whether to draw a step function.
        texts: extra hover text of each point.
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
        """The finite points, as (x, y, text)."""
        texts = self.texts or [""] * len(self.x)
        return [
            (x, y, text)
            for x, y, text in zip(self.x, self.y, texts, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]


def library() -> str:
    """Return plotly's JavaScript, about 4.8 MB; a page needs it once.

    Raises:
        ConfigError: plotly is not installed.
    """
    _plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def curves(
    title: str, lines: Sequence[Line], *, x_title: str = "step", marks: Sequence[float] = (), legend: bool = True
) -> Html:
    """Draw curves over one axis. Return empty text if no point is finite.

    Args:
        title: title of the figure.
        lines: later ones are drawn on top.
        x_title: title of the x axis.
        marks: x of vertical lines, e.g. the starts of attempts.
        legend: whether to show the names if there are several lines.
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
        hover_text = "<br>%{text}" if line.texts else ""
        figure.add_trace(
            go.Scatter(
                x=steps, y=values, name=_label(line.name), mode=mode,
                line={"color": color, "width": line.width or 1, "shape": "hv" if line.step else "linear"},
                marker={"color": color, "size": 6}, text=[_label(each) for each in texts] if line.texts else None,
                hovertemplate=f"%{{y:.5g}} at {_label(x_title)} %{{x:,}}{hover_text}",
            )
        )  # fmt: skip
    for mark in marks:
        figure.add_vline(x=mark, line={"color": _GREY, "width": 1, "dash": "dot"})
    figure.update_layout(showlegend=legend and len(drawn) > 1)
    figure.update_xaxes(title={"text": _label(x_title), "standoff": 6})
    x = [point[0] for _, points in drawn for point in points]
    if max(x) - min(x) <= 10:
        # No ticks between whole steps.
        figure.update_xaxes(dtick=1)
    y = {point[1] for _, points in drawn for point in points}
    if len(y) == 1 and y != {0.0}:
        # Plotly would show a constant of 0.003 on an axis from -1 to 1.
        figure.update_yaxes(range=sorted([0, 2 * y.pop()]))
    return _drawn(figure, title, height=270)


def bar(title: str, parts: Mapping[str, float], colors: Mapping[str, str]) -> Html:
    """Draw one stacked bar.

    Args:
        title: title of the figure.
        parts: seconds by name, >= 0.
        colors: color by name.
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
    """Draw one line per trial through its values. Drawn as SVG, because plotly's own figure needs WebGL.

    An axis is logarithmic if its values are positive and far apart, and categorical if they are not numbers.

    Args:
        title: title of the figure.
        axes: by name, one value per trial.
        names: names of the trials.
        worth: rank of each trial, from 0 for the worst to 1 for the best, which is drawn on top.
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
        hover_text = "<br>".join(f"{_label(name)}: {_label(shown(values[index]))}" for name, values in axes.items())
        color = sample_colorscale("Viridis_r", [0.15 + 0.85 * worth[index]])[0]
        figure.add_trace(
            go.Scatter(
                x=places, y=[scales[name].place(values[index]) for name, values in axes.items()], mode="lines+markers",
                line={"color": color, "width": 3.5 if worth[index] == 1 else 1.6}, marker={"color": color, "size": 5},
                name=_label(names[index]), text=[hover_text] * len(axes), hovertemplate="%{text}",
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
    """Return a value as text; floats with at most five significant digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Scale:
    """An axis from 0 to 1.

    Attributes:
        at: position by value. Numbers are equal as in Python (1 and 1.0; 0.0 and -0.0), other values as text.
        ticks: (position, text).
        numeric: whether all values are finite numbers.
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
                # Skip labels that would overlap.
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
            f"reports need plotly, which cannot be imported ({error}): pip install 'headway[report]'"
        ) from error
    return go


def _drawn(figure: Any, title: str, *, height: int) -> Html:
    import plotly.graph_objects as go

    figure.update_layout(
        # Plotly's default template would be repeated in each figure.
        template=go.layout.Template(), height=height, margin={"l": 56, "r": 12, "t": 8, "b": 40}, autosize=True,
        paper_bgcolor="#fff", plot_bgcolor="#fff", font={"family": _FONT, "size": 12, "color": "#1b1f24"},
        # On a touch screen, dragging must scroll; `ZOOM` makes it zoom if there is a mouse.
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
    """Escape text for plotly, which interprets some HTML tags and `%{...}`."""
    return html.escape(text).replace("%{", "% {")


def _thinned(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Reduce a line to about `_MOST_POINTS` points that look the same: the lowest and highest of each interval."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // _MOST_POINTS)
    kept = []
    for begin in range(0, len(points), size):
        stretch = list(enumerate(points[begin : begin + size], begin))
        ends = {min(stretch, key=lambda each: each[1][1])[0], max(stretch, key=lambda each: each[1][1])[0]}
        kept += [points[index] for index in sorted(ends)]
    return [points[0], *kept, points[-1]]
