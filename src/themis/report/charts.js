// Charts as inline SVG, each with a title, a description and a table of its data.
const W = 460, H = 250, LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 44;
let charts = 0;

function ticks(low, high, n = 5) {
  const span = high - low || 1;
  const rough = span / n;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((size) => span / size <= n) || 10 * unit;
  const marks = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
    marks.push(Math.abs(at) < step * 1e-9 ? 0 : Number(at.toPrecision(12)));
  }
  return marks;
}
const short = (x) => (Math.abs(x) >= 1000 ? `${Number((x / 1000).toPrecision(3))}k` : String(Number(x.toPrecision(3))));

// chart({title, text, x: {label, low, high, format}, y: {...}, draw: [{kind, points, class, name}], table: {heads, rows}})
function chart(of) {
  const id = `chart-${++charts}`;
  const [x, y] = [of.x, of.y].map((axis) => ({ format: short, ...axis, high: axis.high > axis.low ? axis.high : axis.low + 1 }));
  const marks = ticks(y.low, y.high);
  if (marks.length > 1 && marks.at(-1) < y.high) marks.push(2 * marks.at(-1) - marks.at(-2));
  y.high = Math.max(y.high, marks.at(-1));
  const px = (v) => LEFT + ((v - x.low) / (x.high - x.low)) * (W - LEFT - RIGHT);
  const py = (v) => H - BOTTOM - ((v - y.low) / (y.high - y.low)) * (H - TOP - BOTTOM);
  const drawn = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-labelledby': `${id}-t ${id}-d`, class: 'chart' },
    svg('title', { id: `${id}-t` }, of.title), svg('desc', { id: `${id}-d` }, of.text));
  for (const at of marks) {
    drawn.append(svg('line', { class: 'grid', x1: LEFT, x2: W - RIGHT, y1: py(at), y2: py(at) }),
      svg('text', { x: LEFT - 6, y: py(at) + 4, 'text-anchor': 'end' }, y.format(at)));
  }
  for (const at of ticks(x.low, x.high, 6)) {
    drawn.append(svg('line', { class: 'tick', x1: px(at), x2: px(at), y1: H - BOTTOM, y2: H - BOTTOM + 4 }),
      svg('text', { x: px(at), y: H - BOTTOM + 17, 'text-anchor': 'middle' }, x.format(at)));
  }
  drawn.append(svg('line', { class: 'axis', x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }),
    svg('text', { class: 'label', x: (LEFT + W - RIGHT) / 2, y: H - 6, 'text-anchor': 'middle' }, x.label),
    svg('text', { class: 'label', x: -(TOP + H - BOTTOM) / 2, y: 13, transform: 'rotate(-90)', 'text-anchor': 'middle' }, y.label));
  for (const mark of of.draw) drawn.append(...MARKS[mark.kind](mark, px, py));
  const named = of.draw.filter((mark) => mark.name);
  return el('figure', { class: 'figure' }, el('figcaption', {}, of.title), drawn, legend(named), asTable(of));
}

function legend(named) {
  if (!named.length) return null;
  return el('ul', { class: 'legend' }, named.map((mark) =>
    el('li', {}, svg('svg', { viewBox: '0 0 22 8', class: 'key', 'aria-hidden': 'true' },
      svg(mark.kind === 'band' ? 'rect' : 'line', { class: `${mark.kind === 'band' ? 'band' : 'line'} ${mark.class || ''}`,
        x: 1, y: 0, width: 20, height: 8, x1: 1, x2: 21, y1: 4, y2: 4 })), mark.name)));
}

// The rows are created when the table is opened.
function asTable(of) {
  const details = el('details', { class: 'data' }, el('summary', {}, 'Data as a table'));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) {
      details.append(scrolling(of.title, table(of.title, of.table.heads, of.table.rows)));
    }
  });
  return details;
}

const path = (points, px, py) => points.map(([a, b], k) => `${k ? 'L' : 'M'}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join('');
const stepped = (points) => points.flatMap((p, k) => (k ? [[p[0], points[k - 1][1]], [p[0], p[1]]] : [[p[0], p[1]]]));
const MARKS = {
  line: (of, px, py) => [svg('path', { class: `line ${of.class || ''}`, d: path(of.points, px, py) })],
  steps: (of, px, py) => [svg('path', { class: `line ${of.class || ''}`, d: path(stepped(of.points), px, py) })],
  band: (of, px, py) => {
    const upper = stepped(of.points.map((p) => [p[0], p[2]]));
    const lower = stepped(of.points.map((p) => [p[0], p[1]])).reverse();
    return [svg('path', { class: `band ${of.class || ''}`, d: `${path([...upper, ...lower], px, py)}Z` })];
  },
  bars: (of, px, py) => of.points.map(([a, b, v]) =>
    svg('rect', { class: `bar ${of.class || ''}`, x: px(a) + 0.5, y: py(v), width: Math.max(1, px(b) - px(a) - 1), height: Math.max(0, py(0) - py(v)) })),
  limits: (of, px, py) => of.points.flatMap(([a, low, high]) => [
    svg('line', { class: 'limit', x1: px(a), x2: px(a), y1: py(low), y2: py(high) }),
    ...[low, high].map((v) => svg('line', { class: 'limit', x1: px(a) - 4, x2: px(a) + 4, y1: py(v), y2: py(v) }))]),
  dots: (of, px, py) => of.points.map(([a, b]) => svg('circle', { class: `dot ${of.class || ''}`, cx: px(a), cy: py(b), r: 2.4 })),
};

// A small bar in a table cell, followed by its value as text.
function bar(share, text, limits) {
  const at = (v) => Math.max(0, Math.min(1, v)) * 100;
  return el('span', { class: 'cellbar' },
    svg('svg', { viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('rect', { class: 'track', x: 0, y: 0, width: 100, height: 10 }),
      svg('rect', { class: 'bar', x: 0, y: 0, width: at(share), height: 10 }),
      ...(limits ? [svg('line', { class: 'limit', x1: at(limits[0]), x2: at(limits[1]), y1: 5, y2: 5 })] : [])),
    el('span', { class: 'number' }, text));
}

// A tile of the key figures: a value, what is under it, and its share of an axis.
function figure(name, value, under, text, share) {
  return el('div', { class: 'tile' }, el('dt', {}, name),
    el('dd', {}, el('span', { class: 'value' }, value), under ? el('span', { class: 'interval' }, under) : null,
      share ? scale(...share) : null, el('span', { class: 'quiet' }, text)));
}

// A share and its interval on the part of the axis that they need: upwards from 0, or downwards from 1 for shares near 1.
const ENDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
function scale(at, low = at, high = at) {
  const isNearOne = low > 0.5;
  const reach = ENDS.find((end) => end >= 1.1 * (isNearOne ? 1 - low : high)) || 1;
  const [start, end] = isNearOne ? [1 - reach, 1] : [0, reach];
  const x = (v) => Math.max(0, Math.min(100, (100 * (v - start)) / (end - start)));
  const label = (v) => el('span', {}, `${short(100 * v)}%`);
  return el('span', { class: 'scale', 'aria-hidden': 'true' }, label(start),
    svg('svg', { viewBox: '0 0 100 6', preserveAspectRatio: 'none', class: 'range' },
      svg('rect', { class: 'track', x: 0, y: 2, width: 100, height: 2 }),
      low < high ? svg('rect', { class: 'bar', x: x(low), y: 1, width: x(high) - x(low), height: 4 }) : null,
      svg('rect', { class: 'mark', x: Math.max(0, Math.min(98.8, x(at) - 0.6)), y: 0, width: 1.2, height: 6 })), label(end));
}
