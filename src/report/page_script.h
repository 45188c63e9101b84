// The script of the page: it shows values under the pointer or by arrow keys, and polls while a run is watched.
// The page can be read without it. It inserts text as text and never as markup, except for the response of /data, which
// is markup of this program.
#pragma once

namespace moebius {

inline constexpr char kPageScript[] = R"js('use strict';(() => {
const NS = 'http://www.w3.org/2000/svg';
const make = (tag, attributes) => {
  const e = document.createElementNS(NS, tag);
  for (const k in attributes) e.setAttribute(k, attributes[k]);
  return e;
};
const scaled = (v, step, units) => {
  let at = 0;
  while (Math.abs(v) >= step * 0.9995 && at + 1 < units.length) { v /= step; ++at; }
  const a = Math.abs(v);
  return (at === 0 && Number.isInteger(v) ? String(v) : v.toFixed(a >= 99.95 ? 0 : a >= 9.995 ? 1 : 2)) + (units[at] ? ' ' + units[at] : '');
};
const text = (v, unit) => {
  if (v === null) return 'none';
  const a = Math.abs(v);
  if (unit === 'bytes') return scaled(v, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']);
  if (unit === 'count' && a >= 1e4) return scaled(v, 1000, ['', 'k', 'M', 'G', 'T', 'P']);
  if (unit === 'seconds') return v === 0 ? '0 s' : a < 1e-3 ? +(v * 1e6).toPrecision(3) + ' us' : a < 1 ? +(v * 1e3).toPrecision(3) + ' ms' : +v.toPrecision(4) + ' s';
  if (unit === 'ratio') return +(v * 100).toPrecision(3) + ' %';
  return v !== 0 && (a < 1e-3 || a >= 1e6) ? v.toExponential(2) : String(+v.toPrecision(5));
};
const steps = (a, b) => a === b ? 'step ' + a : 'steps ' + a + ' to ' + b;
const dataOf = figure => {
  if (!figure.plot) {
    const source = figure.querySelector('script[type="application/json"]');
    if (!source) return null;
    figure.plot = JSON.parse(source.textContent);
    for (const line of figure.plot.lines || []) line.b = line.b || line.a;
  }
  return figure.plot;
};
let shown = null;
const hide = () => {
  if (!shown) return;
  for (const e of shown.querySelectorAll('.tip,.cursor,.pick,.dot.over')) e.remove();
  shown = null;
};
const tipAt = (figure, x, y, head, lines) => {
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.setAttribute('role', 'status');
  const title = document.createElement('b');
  title.textContent = head;
  tip.append(title);
  for (const line of lines) {
    const row = document.createElement('span');
    row.textContent = line;
    tip.append(row);
  }
  figure.append(tip);
  const box = figure.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = x - box.left + 14 + own.width > box.width ? x - box.left - 14 - own.width : x - box.left + 14;
  tip.style.left = Math.max(2, left) + 'px';
  tip.style.top = Math.max(2, Math.min(y - box.top - own.height / 2, box.height - own.height - 2)) + 'px';
  shown = figure;
};
const place = (svg, x, y) => {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [box.left + x / view.width * box.width, box.top + y / view.height * box.height];
};
const nearest = (line, step) => {
  let low = 0, high = line.a.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line.a[middle] <= step) low = middle; else high = middle;
  }
  const away = i => line.a[i] <= step && step <= line.b[i] ? 0 : Math.min(Math.abs(line.a[i] - step), Math.abs(line.b[i] - step));
  return away(high) < away(low) ? high : low;
};
const centre = (line, i) => (line.a[i] + line.b[i]) / 2;
const showLines = (figure, svg, plot, step) => {
  hide();
  const px = s => plot.x[1] === plot.x[0] ? (plot.l + plot.r) / 2 : plot.l + (s - plot.x[0]) / (plot.x[1] - plot.x[0]) * (plot.r - plot.l);
  const f = v => plot.log ? Math.log(v) : v;
  const py = v => plot.b - (f(v) - f(plot.y[0])) / (f(plot.y[1]) - f(plot.y[0])) * (plot.b - plot.t);
  const rows = [];
  let head = null, best = Infinity, at = 0;
  for (const line of plot.lines) {
    const i = nearest(line, step), away = Math.abs(centre(line, i) - step);
    if (away < best) { best = away; at = centre(line, i); head = steps(line.a[i], line.b[i]); }
  }
  for (const line of plot.lines) {
    const i = nearest(line, at);
    const far = Math.abs(px(centre(line, i)) - px(at)) > 12;
    if (far) continue;
    const range = line.lo ? ' (' + text(line.lo[i], plot.unit) + ' to ' + text(line.hi[i], plot.unit) + ')' : '';
    const here = line.a[i] <= at && at <= line.b[i];
    rows.push((line.n ? line.n + '  ' : '') + text(line.m[i], plot.unit) + range + (here ? '' : ', ' + steps(line.a[i], line.b[i])));
    svg.append(make('circle', {class: 'dot full over c' + line.c, cx: px(centre(line, i)), cy: py(line.m[i]), r: 3.5}));
  }
  svg.append(make('path', {class: 'cursor', d: 'M' + px(at) + ' ' + plot.t + 'V' + plot.b}));
  const where = place(svg, px(at), (plot.t + plot.b) / 2);
  tipAt(figure, where[0], where[1], head, rows);
  figure.at = at;
};
const showCell = (figure, svg, plot, row, column) => {
  hide();
  const w = (plot.r - plot.l) / plot.columns.length, h = (plot.b - plot.t) / plot.rows.length;
  const c = plot.columns[column], value = plot.v[row * plot.columns.length + column];
  const x = plot.l + column * w, y = plot.t + row * h;
  svg.append(make('rect', {class: 'pick', x: x - .5, y: y - .5, width: w + 1, height: h + 1}));
  const where = place(svg, x + w, y + h / 2);
  const head = (plot.row ? plot.row + ' ' : '') + plot.rows[row];
  tipAt(figure, where[0], where[1], head, [Array.isArray(c) ? steps(c[0], c[1]) : plot.column + ' ' + c, text(value, plot.unit) + plot.after]);
  figure.at = [row, column];
};
const clamp = (v, low, high) => Math.max(low, Math.min(high, v));
const showAt = (figure, svg, clientX, clientY) => {
  const plot = dataOf(figure);
  if (!plot) return;
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const x = (clientX - box.left) / box.width * view.width, y = (clientY - box.top) / box.height * view.height;
  if (plot.lines) {
    if (x < plot.l - 12 || x > view.width) return hide();
    const part = clamp((x - plot.l) / (plot.r - plot.l), 0, 1);
    return showLines(figure, svg, plot, plot.x[0] + part * (plot.x[1] - plot.x[0]));
  }
  if (x < plot.l || x >= plot.r || y < plot.t || y >= plot.b) return hide();
  showCell(figure, svg, plot, Math.floor((y - plot.t) / (plot.b - plot.t) * plot.rows.length),
           Math.floor((x - plot.l) / (plot.r - plot.l) * plot.columns.length));
};
let pointer = null;
const onPointer = event => {
  pointer = [event.clientX, event.clientY];
  const target = event.target instanceof Element ? event.target : null;
  const figure = target && target.closest('figure');
  if (!figure) return hide();
  const marked = target.closest('[data-tip]');
  if (marked) {
    hide();
    const lines = marked.getAttribute('data-tip').split('\n');
    return tipAt(figure, event.clientX, event.clientY, lines[0], lines.slice(1));
  }
  const svg = target.closest('svg');
  if (svg) showAt(figure, svg, event.clientX, event.clientY); else hide();
};
document.addEventListener('pointermove', onPointer);
document.addEventListener('pointerdown', onPointer);
document.addEventListener('keydown', event => {
  const svg = document.activeElement && document.activeElement.closest && document.activeElement.closest('figure svg');
  if (event.key === 'Escape') return hide();
  const move = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
  if (!svg || !move) return;
  const figure = svg.closest('figure'), plot = dataOf(figure);
  if (!plot) return;
  if (plot.lines) {
    if (!move[1]) return;
    const line = plot.lines[0], last = line.a.length - 1;
    const i = figure.at === undefined ? last : clamp(nearest(line, figure.at) + move[1], 0, last);
    showLines(figure, svg, plot, centre(line, i));
  } else {
    const at = figure.at || [0, 0];
    showCell(figure, svg, plot, clamp(at[0] + move[0], 0, plot.rows.length - 1), clamp(at[1] + move[1], 0, plot.columns.length - 1));
  }
  event.preventDefault();
});
)js"
                                      R"js(
const period = Number(document.body.dataset.period || 0);
let version = document.body.dataset.version || '';
const setLive = (words, lost) => {
  const live = document.querySelector('.live');
  if (!live) return;
  live.textContent = words;
  live.classList.toggle('lost', lost);
};
const poll = async () => {
  try {
    const answer = await fetch('data', {headers: version ? {'If-None-Match': version} : {}, cache: 'no-store'});
    if (answer.status === 200) {
      const open = [...document.querySelectorAll('details[open]')].map(e => e.id);
      const focused = document.activeElement && document.activeElement.closest ? document.activeElement.closest('figure') : null;
      const markup = await answer.text();
      version = answer.headers.get('ETag') || '';
      hide();
      document.getElementById('page').innerHTML = markup;
      for (const id of open) { const e = document.getElementById(id); if (e) e.open = true; }
      if (focused) { const svg = document.querySelector('#' + CSS.escape(focused.id) + ' svg'); if (svg) svg.focus({preventScroll: true}); }
      if (pointer) {
        const under = document.elementFromPoint(pointer[0], pointer[1]), svg = under && under.closest('figure svg');
        if (svg) showAt(svg.closest('figure'), svg, pointer[0], pointer[1]);
      }
    }
    if (answer.status === 200 || answer.status === 304) setLive('live', false);
    else setLive('not followed: answer ' + answer.status, true);
  } catch (error) {
    setLive('moebius watch has ended; this is the last state', true);
  }
  setTimeout(poll, period);
};
if (period > 0) setTimeout(poll, period);
})();
)js";

}  // namespace moebius
