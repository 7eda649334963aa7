// The gallery: faults as cards, filtered, sorted and split into pages. Pictures are drawn for the visible cards only.
const PAGE = innerWidth < 640 ? 12 : 24;
const NONE = '';
const state = { clean: NONE, answer: NONE, group: NONE, layer: NONE, pictures: false, sort: 'telling', page: 0, view: null };
const SORTS = {
  telling: ['most telling first', null],
  severity: ['most severe first', (c) => c.margin.map((v) => (v === null ? -Infinity : v))],
  theta: ['smallest theta first', (c) => c.strength],
  ssim: ['most similar first (SSIM)', (c) => c.ssim.map((v) => (v === null ? Infinity : -v))],
};

function choose(changes) {
  Object.assign(state, { page: 0, group: NONE, layer: NONE }, changes);
  drawGallery(state.view);
}

const count = (column) => column.reduce((counts, value) => counts.set(value, (counts.get(value) || 0) + 1), new Map());

// A list to choose from; null if it offers no choice.
function select(name, label, options) {
  const id = `filter-${name}`;
  const change = (event) => { state[name] = event.target.value; state.page = 0; drawCards(); };
  if (!options.some(([value]) => String(value) === String(state[name]))) state[name] = options[0][0];
  if (options.length < 3) return null; // all, and at most one value
  return el('div', { class: 'field' }, el('label', { for: id }, label),
    el('select', { id, onchange: change }, options.map(([value, text]) =>
      el('option', { value, selected: String(value) === String(state[name]) }, text))));
}

function drawGallery(view) {
  state.view = view;
  const { columns, n, n_listed: listed } = view.faults;
  if (!n) return show('gallery', 'Faults', note('No fault was found.'));
  const options = (column, named) => [[NONE, 'all'], ...[...count(columns[column])].filter(([value]) => value !== null && value !== -1 || column === 'answer')
    .sort((a, b) => a[0] - b[0]).map(([value, n]) => [value, `${named(value)} (${whole(n)})`])];
  const layers = view.layers.map((layer) => layer.name);
  const brief = (text) => (text.length > 60 ? `${text.slice(0, 58)}…` : text);
  const { kind } = view.inputs;
  const nShown = kind === 'none' ? 0 : Object.keys(view.inputs[kind === 'features' ? 'changes' : 'disturbed']).length;
  const shown = nShown === n ? `${n === 1 ? 'It is' : 'All are'} shown` : `${whole(nShown)} of them ${nShown === 1 ? 'is' : 'are'} shown`;
  if (document.activeElement.closest('.filters')) return drawCards(); // keep a list open that the user has just opened
  show('gallery', 'Faults',
    note(`${many(n, 'fault')}${listed < n ? `, of which the ${whole(listed)} most telling are listed` : ''}. ${
      { pictures: `${shown} with pictures`, clips: `${shown} with their frames`, signals: `${shown} with curves, clean in grey and disturbed in red`,
        features: `${shown} with the features that changed`, none: 'No inputs were kept' }[kind]}${
      nShown < n ? `; replay ${nShown ? 'the others to see their inputs' : 'a fault to see its input'}` : ''}.`),
    el('form', { class: 'filters', 'aria-label': 'Filter and sort faults', onsubmit: (event) => event.preventDefault() },
      select('clean', 'Clean answer', options('clean_answer', (k) => view.answers[k] ?? String(k))),
      select('answer', 'Wrong answer', options('answer', (k) => view.outcomes[k] ?? String(k))),
      select('group', 'Group', options('group', (k) => `${k + 1}: ${brief(view.groups[k].text)}`)),
      select('layer', 'Most changed layer', options('layer', (k) => layers[k] ?? String(k))),
      select('sort', 'Sort by', Object.entries(SORTS).filter(([name]) => name !== 'ssim' || columns.ssim.some((v) => v !== null))
        .map(([name, [text]]) => [name, text])),
      nShown && nShown < n ? el('div', { class: 'field check' }, el('input', { type: 'checkbox', id: 'filter-pictures', checked: state.pictures,
        onchange: (event) => { state.pictures = event.target.checked; state.page = 0; drawCards(); } }),
      el('label', { for: 'filter-pictures' }, 'Only faults with inputs')) : null),
    pager('above'), el('div', { id: 'cards', class: 'cards' }), pager('below'),
    view.groups.length ? el('details', { 'data-key': 'groups', class: 'data' }, el('summary', {}, `${many(view.groups.length, 'group')} of related faults`),
      el('ol', { class: 'groups' }, view.groups.map((group) => el('li', {}, group.text)))) : null);
  drawCards();
}

function pager(where) {
  const go = (step) => () => { state.page += step; drawCards(); if (where === 'below') by('gallery').scrollIntoView(); };
  return el('div', { class: 'pager', role: 'group', 'aria-label': `Pages of faults, ${where}` },
    el('button', { type: 'button', id: `previous-${where}`, class: 'previous', onclick: go(-1) }, 'Previous'),
    el('p', { class: 'pages', role: where === 'above' ? 'status' : null }),
    el('button', { type: 'button', id: `next-${where}`, class: 'next', onclick: go(1) }, 'Next'));
}

// Indices of the faults that pass the filters, in the chosen order.
function chosenRows(view) {
  const c = view.faults.columns;
  const is = (name, column) => (state[name] === NONE ? () => true : (k) => String(c[column][k]) === String(state[name]));
  const tests = [is('clean', 'clean_answer'), is('answer', 'answer'), is('group', 'group'), is('layer', 'layer')];
  if (state.pictures) tests.push((k) => hasInput(view, k));
  const rows = c.id.map((_, k) => k).filter((k) => tests.every((passes) => passes(k)));
  const key = SORTS[state.sort][1];
  if (key) {
    const values = key(c);
    rows.sort((a, b) => (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : a - b));
  }
  return rows;
}
const hasInput = (view, k) => String(view.faults.columns.id[k]) in view.inputs[view.inputs.kind === 'features' ? 'changes' : 'disturbed'];

function drawCards() {
  const view = state.view;
  const rows = chosenRows(view);
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  state.page = Math.max(0, Math.min(state.page, pages - 1));
  const shown = rows.slice(state.page * PAGE, (state.page + 1) * PAGE);
  for (const pager of document.querySelectorAll('.pager')) {
    pager.querySelector('.pages').textContent = rows.length
      ? `${whole(state.page * PAGE + 1)} to ${whole(state.page * PAGE + shown.length)} of ${whole(rows.length)}, page ${whole(state.page + 1)} of ${whole(pages)}` : 'No fault matches.';
    pager.querySelector('.previous').disabled = state.page === 0;
    pager.querySelector('.next').disabled = state.page >= pages - 1;
  }
  const c = view.faults.columns;
  const key = JSON.stringify(shown.map((k) => [c.id[k], c.group[k], hasInput(view, k)]));
  if (by('cards').dataset.shown === key) return;
  by('cards').dataset.shown = key;
  by('cards').replaceChildren(...shown.map((k) => card(view, k)));
}

// What the value of a fault measures, in tasks whose answer is not a number itself.
const MEASURES = { detection: 'F1 score', segmentation: 'mean IoU', keypoints: 'pixels off' };

function answers(view, k) {
  const c = view.faults.columns;
  if (MEASURES[view.task]) return ['as expected', view.outcomes[c.answer[k]]];
  const sure = c.confidence[k] === null ? '' : ` (${percent(c.confidence[k], 0)})`;
  if (c.clean_value[k] !== null && c.clean_answer[k] === null) {
    return [number(c.clean_value[k]), c.value[k] === null ? view.outcomes[c.answer[k]] : `${number(c.value[k])}${sure}`];
  }
  const beside = view.task !== 'against' ? '' : `, reference ${c.value[k] === null ? 'not finite' : view.outcomes[c.value[k]] ?? c.value[k]}`;
  return [c.clean_answer[k] === null ? 'as expected' : view.answers[c.clean_answer[k]], `${view.outcomes[c.answer[k]]}${sure}${beside}`];
}

function card(view, k) {
  const c = view.faults.columns, id = c.id[k];
  const [before, after] = answers(view, k);
  const facts = [...view.theta.map((t, d) => [t.name, number(c.theta[d][k])]),
    MEASURES[view.task] && c.value[k] !== null ? [MEASURES[view.task], number(c.value[k])] : null,
    c.ssim[k] === null ? null : ['SSIM', number(c.ssim[k])], ['distance', number(c.distance[k])]].filter(Boolean);
  const more = [['seed', c.seed_id[k]], ['label', c.label[k] === null ? '–' : view.answers[c.label[k]] ?? c.label[k]], ['round', c.round[k]],
    ['stream', c.uniform[k] ? 'uniform' : `search, ${c.kind[k]}`], ['strength', number(c.strength[k])],
    ...view.faults.details.map(([name, title]) => [title, c[name][k] === null ? 'not finite' : number(c[name][k])]),
    ['layer', view.layers[c.layer[k]] ? view.layers[c.layer[k]].name : '–'], c.group[k] < 0 ? null : ['group', c.group[k] + 1]].filter(Boolean);
  const list = (rows) => el('dl', { class: 'facts' }, rows.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
  return el('article', { class: 'card', 'aria-labelledby': `fault-${id}` },
    el('h3', { id: `fault-${id}` }, `Fault ${id}: `, el('span', { class: 'right' }, before), ' → ', el('span', { class: 'wrong' }, after)),
    input(view, k, before, after), list(facts),
    el('details', { 'data-key': `fault-${id}` }, el('summary', {}, 'Details and replay command'), list(more),
      command(`themis replay ${shellQuoted(view.run)} ${id}`)));
}
const shellQuoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`);

function input(view, k, before, after) {
  const c = view.faults.columns, id = String(c.id[k]);
  const changes = view.inputs.changes[id], disturbed = view.inputs.disturbed[id];
  if (changes) {
    const rest = changes.n - changes.rows.length;
    return el('div', { class: 'changes' }, changes.rows.length ? table(`${whole(changes.n)} of ${whole(changes.of)} features changed${rest ? `; the ${whole(changes.rows.length)} largest changes are listed` : ''}`,
      ['feature', 'before', 'after'], changes.rows.map(([name, a, b]) => [name, number(a, 4), number(b, 4)])) : note('No feature changed.'));
  }
  if (!disturbed) return note(c.kept[k] ? 'The input was kept, but it is not shown in this report.' : 'The input was not kept; replay the fault to see it.');
  if (view.inputs.kind === 'signals') {
    const text = `Clean and disturbed signal of fault ${id}, answered ${before} and ${after}`;
    return el('figure', { class: 'curves' }, el('img', { src: disturbed, alt: text, decoding: 'async' }),
      el('figcaption', {}, 'clean in grey, disturbed in red'));
  }
  const picture = (source, text) => el('img', { src: source, alt: text, width: 96, height: 96, decoding: 'async' });
  const clean = picture(view.inputs.clean[String(c.seed_id[k])], `Clean input of seed ${c.seed_id[k]}, answered ${before}`);
  const broken = picture(disturbed, `Disturbed input of fault ${id}, answered ${after}`);
  const canvas = el('canvas', { role: 'img', 'aria-label': 'Difference, amplified', width: 1, height: 1 });
  const under = el('figcaption', {}, 'difference');
  Promise.all([clean.decode(), broken.decode()]).then(() => drawDifference(clean, broken, canvas, under)).catch(() => {});
  const framed = (shown, angles) => el('div', { class: 'frame' }, shown, angles ? steering(angles) : null);
  const angles = isSteering(view) ? [c.clean_value[k], c.value[k]] : null;
  const caption = (text, at) => el('figcaption', {}, text, ...(angles && angles[at] !== null ? [steered(angles[at], ['before', 'after'][at])] : []));
  return el('div', { class: view.inputs.kind === 'clips' ? 'pictures strips' : 'pictures' },
    el('figure', {}, framed(clean, angles && [angles[0]]), caption('clean', 0)),
    el('figure', {}, framed(broken, angles), caption('disturbed', 1)),
    el('figure', {}, framed(canvas), under));
}

// Lighter than middle grey where the disturbance added to the input, darker where it took away.
function drawDifference(clean, broken, canvas, under) {
  const [w, h] = [clean.naturalWidth, clean.naturalHeight];
  [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext('2d', { willReadFrequently: true });
  const read = (image) => { context.drawImage(image, 0, 0); return context.getImageData(0, 0, w, h).data; };
  const a = read(clean), b = read(broken), out = context.createImageData(w, h);
  const gaps = [];
  for (let k = 0; k < a.length; k++) if (k % 4 !== 3 && a[k] !== b[k]) gaps.push(Math.abs(b[k] - a[k]));
  gaps.sort((x, y) => x - y);
  const times = gaps.length ? Math.max(1, Math.round(120 / gaps[Math.floor(0.95 * (gaps.length - 1))])) : 1;
  for (let k = 0; k < a.length; k++) out.data[k] = k % 4 === 3 ? 255 : 128 + times * (b[k] - a[k]);
  context.putImageData(out, 0, 0);
  under.textContent = `difference ×${times}`;
  canvas.setAttribute('aria-label', `Difference, amplified ${times} times`);
}

// Answers that look like steering angles: radians, negative to the left.
const isSteering = (view) => ['regression', 'off'].includes(view.task) && view.inputs.kind === 'pictures' &&
  view.faults.columns.clean_value.some((v) => v !== null) &&
  view.faults.columns.value.concat(view.faults.columns.clean_value).every((v) => v === null || Math.abs(v) <= Math.PI);

// The caption of a steering angle, in degrees.
function steered(angle, name) {
  const degrees = number(Math.abs((angle * 180) / Math.PI), 2);
  return el('span', { class: `steered ${name}` }, `${degrees}°${angle < 0 ? ' left' : angle > 0 ? ' right' : ''}`);
}

function steering(angles) {
  const line = (angle, name) => angle === null ? null : svg('line', { class: `steer ${name}`, x1: 50, y1: 98,
    x2: 50 + 60 * Math.sin(angle), y2: 98 - 60 * Math.cos(angle) });
  return svg('svg', { viewBox: '0 0 100 100', class: 'over', 'aria-hidden': 'true' },
    angles.length > 1 ? line(angles[1], 'after') : null, line(angles[0], 'before'));
}
