// The page of a run: its title, and its sections by id, in the order of the questions that a reader has.
const heading = (view) => `${view.perturbation} on ${view.subject}`;
const SECTIONS = {
  verdict: ['Verdict', drawVerdict],
  numbers: ['Key figures', drawNumbers],
  gates: ['Gates', drawGates],
  gallery: ['Faults', drawGallery],
  matrix: ['Answers', drawMatrix],
  strength: ['Strength', drawStrength],
  slices: ['Slices', drawSlices],
  reproduce: ['Reproduce', drawReproduce],
  coverage: ['Coverage', drawCoverage],
  layers: ['Layers', drawLayers],
  time: ['Time', drawTime],
  normality: ['Normality', drawNormality],
};

function drawVerdict(view) {
  show('verdict', 'Verdict', el('p', { class: `verdict ${view.verdict.tone}` }, view.verdict.text),
    view.decision ? el('p', { class: 'stop' }, `${view.decision}.`) : null,
    el('p', { class: 'stop' }, view.stop),
    view.gates ? el('p', { class: 'stop' }, view.gates.sentence) : null,
    view.slight ? note(`${view.slight}.`) : null, view.fault ? note(`A fault is ${view.fault}.`) : null,
    view.next ? el('div', {}, command(view.next.command, `Next: ${view.next.purpose.toLowerCase()}`)) : null);
}

function drawNumbers(view) {
  const { counts, coverage, fault_rate: rate, residual_risk: risk, reach, review } = view;
  const range = (e) => (e ? [e.value, e.low, e.high] : null);
  const spread = coverage && coverage.interval;
  const clean = view.clean.accuracy !== null ? `${percent(view.clean.accuracy)} of the clean inputs answered correctly`
    : view.clean.error !== null ? `clean error ${number(view.clean.error)} on average`
      : view.clean.map !== null ? `clean mAP ${number(view.clean.map)}`
      : view.clean.iou !== null ? `clean mean IoU ${number(view.clean.iou)}` : '';
  show('numbers', 'Key figures', el('dl', { class: 'tiles' },
    figure('Fault rate', rate ? percent(rate.value, 2) : 'unknown', interval(rate),
      rate ? (view.profile ? `in operation: ${view.profile}` : 'of random disturbances in this range, averaged over seeds') : 'cannot be estimated without a uniform stream', range(rate)),
    review ? figure('Valid fault rate', review.fault_rate ? percent(review.fault_rate.value, 2) : 'unknown', interval(review.fault_rate),
      [review.counts, review.fault_rate ? '' : `at least ${whole(review.needed)} must be marked`, ...view.agreements].filter(Boolean).join('; '),
      range(review.fault_rate)) : null,
    figure('Residual risk', risk ? percent(risk.value, 2) : 'unknown', interval(risk),
      'probability that the next random test finds a distinct fault that no test of the campaign has found', range(risk)),
    reach ? figure('Within reach', reach.found ? `${whole(reach.found)} of about ${whole(reach.faults.value)}` : 'none found',
      reach.found ? `95%: ${whole(reach.faults.low)} to ${whole(reach.faults.high)}` : `95%: at most ${whole(reach.faults.high)}`,
      `distinct faults that four times the tests would find${reach.found ? `, on about ${many(reach.seeds.value, 'seed')}` : ''}${
        reach.forecast ? `; ${forecast(reach.forecast)} find 95% of them` : ''}`) : null,
    !view.covers_neurons ? null : figure('Coverage', coverage ? percent(coverage.sampled) : 'none yet',
      coverage ? `${percent(coverage.all)} of all neurons${spread ? ` (${interval(spread, 1)})` : ''}` : '',
      'of the sampled neurons have converged', coverage ? (spread ? [coverage.all, spread.low, spread.high] : [coverage.all]) : null),
    figure('Distinct faults', whole(counts.distinct_faults), `${many(counts.faults, 'fault')} in ${many(counts.tests, 'test')}`,
      `on ${whole(counts.failing_seeds)} of ${many(counts.seeds, 'seed')}`),
    figure('Seeds', whole(counts.seeds), `of ${whole(counts.seeds_given)} given${view.left_out ? `; the others are left out: ${view.left_out}` : ''}`, clean),
    view.criterion ? figure('Criterion', view.criterion.is_share ? percent(view.criterion.score) : number(view.criterion.score, 4),
      view.criterion.name, `${many(view.criterion.raised, 'test')} raised it`) : null),
  view.calibration ? note(`Calibration: ${view.calibration}.`) : null);
}

function drawMatrix(view) {
  const { rows, columns, distinct, faults } = view.matrix;
  const title = 'How answers change';
  if (!rows.length) return show('matrix', title, note('No fault has been found.'));
  const named = (names, answer, none) => (answer === null ? none : answer === 'other' ? 'other' : names[answer] ?? String(answer));
  const most = Math.max(1, ...distinct.flat());
  const cell = (r, c) => {
    const n = distinct[r][c];
    if (!n) return el('td', { class: 'none' }, '·');
    const level = Math.ceil((5 * Math.log1p(n)) / Math.log1p(most));
    const label = `${named(view.answers, rows[r], 'clean')} answered as ${named(view.outcomes, columns[c])}: ` +
      `${many(n, 'distinct fault')}, ${many(faults[r][c], 'fault')}`;
    if (rows[r] === 'other' || columns[c] === 'other') return el('td', { class: `heat heat${level}`, title: label }, whole(n));
    const pick = () => { choose({ clean: rows[r], answer: columns[c] }); location.hash = '#gallery'; };
    return el('td', { class: `heat heat${level}` },
      el('button', { type: 'button', title: label, 'aria-label': `${label}; show them`, onclick: pick }, whole(n)));
  };
  const single = rows.length === 1 && rows[0] === null;
  const isTall = columns.some((c) => named(view.outcomes, c).length > 3);
  show('matrix', title, scrolling(title, el('table', { class: isTall ? 'matrix tall' : 'matrix' },
    el('caption', {}, `Distinct faults. Rows are the answers to clean inputs, columns ${view.task === 'against'
      ? 'those of the model to disturbed inputs; on the diagonal, only the reference changed its answer' : 'the wrong answers'}. Select a cell to see its faults.`),
    el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'clean → wrong'), columns.map((c) =>
      el('th', { scope: 'col' }, el('span', {}, named(view.outcomes, c)))), el('th', { scope: 'col' }, el('span', {}, 'total')))),
    el('tbody', {}, rows.map((answer, r) => el('tr', {},
      el('th', { scope: 'row' }, named(view.answers, answer, single ? 'all seeds' : 'none')),
      columns.map((_, c) => cell(r, c)), el('td', { class: 'sum' }, whole(distinct[r].reduce((a, b) => a + b, 0)))))))));
}

function drawStrength(view) {
  const drawn = view.rates.map((of) => chart({
    title: `Fault rate by ${of.name}`,
    text: `Share of uniform tests that are faults in ${of.parts.length} equal parts of the range of ${of.name}, with 95% intervals.`,
    x: { label: of.unit ? `${of.name} (${of.unit})` : of.name, low: of.parts[0].low, high: of.parts.at(-1).high },
    y: { label: 'fault rate', low: 0, high: Math.max(0.01, ...of.parts.map((p) => p.rate_high)), format: (v) => `${short(100 * v)}%` },
    draw: [{ kind: 'bars', class: 'fault', points: of.parts.map((p) => [p.low, p.high, p.rate]) },
      { kind: 'limits', points: of.parts.map((p) => [(p.low + p.high) / 2, p.rate_low, p.rate_high]) }],
    table: { heads: [of.name, 'tests', 'faults', 'rate', '95% interval'], rows: of.parts.map((p) => [
      `${number(p.low)} to ${number(p.high)}`, whole(p.tests), whole(p.faults), percent(p.rate, 2),
      `${percent(p.rate_low, 2)} to ${percent(p.rate_high, 2)}`]) },
  }));
  const parts = view.strengths;
  const least = Math.min(...parts.map((p) => p.correct.low));
  const withstood = parts.length ? chart({
    title: 'Correct under a random disturbance, by strength',
    text: 'Share of random disturbances in each part of the strength that the model still answers correctly, with 95% intervals.',
    x: { label: "strength, share of theta's range", low: 0, high: 1 },
    y: { label: 'correct', low: least > 0.8 ? floorTo(least) : 0, high: 1, format: (v) => `${short(100 * v)}%` },
    draw: [{ kind: 'dots', points: parts.map((p) => [(p.low + p.high) / 2, p.correct.value]) },
      { kind: 'limits', points: parts.map((p) => [(p.low + p.high) / 2, p.correct.low, p.correct.high]) }],
    table: { heads: ['strength', 'tests', 'correct', '95% interval'], rows: parts.map((p) => [
      `${number(p.low)} to ${number(p.high)}`, whole(p.tests), percent(p.correct.value), `${percent(p.correct.low)} to ${percent(p.correct.high)}`]) },
  }) : null;
  const of = view.breaking;
  const curve = of && chart({
    title: 'Seeds that the search could not break, by strength',
    text: `Share of seeds that no disturbance up to a given strength is known to break. ${of.source}`,
    x: { label: of.unit ? `strength: 1 is ${of.unit}` : "strength, share of theta's range", low: 0, high: Math.max(1, of.points.at(-1)[0]) },
    y: { label: 'seeds not broken', low: Math.min(...of.points.map((p) => p[2] ?? p[1])) > 0.8 ? floorTo(Math.min(...of.points.map((p) => p[2] ?? p[1]))) : 0,
      high: 1, format: (v) => `${short(100 * v)}%` },
    draw: [...(of.points[0].length > 2 ? [{ kind: 'band', points: of.points.map((p) => [p[0], p[2], p[3]]), name: '95% interval' }] : []),
      { kind: 'steps', points: of.points, name: 'not broken' }],
    table: { heads: ['strength', 'not broken', ...(of.points[0].length > 2 ? ['95% interval'] : [])], rows: of.points.map((p) =>
      [number(p[0]), percent(p[1]), ...(p.length > 2 ? [`${percent(p[2])} to ${percent(p[3])}`] : [])]) },
  });
  show('strength', 'Fault rate and strength',
    note(drawn.length ? `Fault rates are estimated from the uniform stream only. The Wilson intervals treat tests as independent.${
      view.has_dropped ? ' Dropped tests are counted as tests without a fault.' : ''}`
      : 'Fault rates cannot be estimated without a uniform stream.'),
    el('div', { class: 'charts' }, drawn, withstood, curve),
    withstood && curve ? note('A random disturbance is one draw per test; the search tries many on a seed and counts it as broken if one of them ' +
      'breaks it, so fewer seeds are left than random disturbances are withstood.') : null,
    of ? note(of.median === null ? `The search could not break more than half of the seeds at any strength. ${of.source}`
      : `Half of the seeds can be broken up to strength ${number(of.median)}. ${of.source}`) : note('No seed was broken.'));
}

function drawSlices(view) {
  const tested = view.slices.filter((s) => s.fault_rate);
  const columns = [...new Set(tested.map((s) => s.column))];
  if (!columns.length) return setHidden('slices', true);
  const by = { class: `by ${view.clean.accuracy !== null ? 'their label' : 'their clean answer'}` };
  const isWorst = (s) => view.worst_slices.includes(`${s.column} ${s.value}`);
  const tables = columns.map((column) => scrolling(column, table(
    `Share of random disturbances that break the seeds of a slice, ${by[column] ?? `by ${column}`}, the highest first.`,
    [column, 'fault rate', '95% interval', 'seeds', 'random tests'],
    tested.filter((s) => s.column === column).sort((a, b) => b.fault_rate.value - a.fault_rate.value).map((s) => [
      isWorst(s) ? el('strong', {}, s.value) : s.value,
      bar(s.fault_rate.value, percent(s.fault_rate.value), [s.fault_rate.low, s.fault_rate.high]),
      `${percent(s.fault_rate.low)} to ${percent(s.fault_rate.high)}`, whole(s.seeds), whole(s.tests)]), { class: 'layers' })));
  const worst = view.worst_slices;
  show('slices', 'Fault rate by slice', note(worst.length ? `Fail clearly more often than all seeds: ${worst.slice(0, 10).join(', ')}.`
    : 'No slice fails clearly more often than the seeds as a whole.'), tables);
}
const floorTo = (v) => Math.floor(v * 20 - 0.2) / 20;

function drawCoverage(view) {
  const { rounds, coverage } = view;
  if (!rounds.length) return show('coverage', 'Coverage by round', note('No round has finished yet.'));
  const last = rounds.at(-1);
  const spread = coverage.interval;
  const isNear = coverage.forecast && coverage.forecast < 1e10 && view.goal && coverage.sampled < view.goal;
  const end = isNear ? Math.min(last.tests + coverage.forecast, 3 * last.tests) : last.tests;
  const reached = isNear && end < last.tests + coverage.forecast
    ? coverage.sampled + ((view.goal - coverage.sampled) * (end - last.tests)) / coverage.forecast : view.goal;
  const low = Math.min(...rounds.map((r) => Math.min(r.coverage, r.coverage_all)), spread ? spread.low : 1);
  const of = (name) => [...rounds.map((r) => [r.tests, r[name]])];
  const found = () => chart({
    title: 'Distinct faults by tests',
    text: `Distinct faults found after each of ${rounds.at(-1).number} rounds.`,
    x: { label: 'tests', low: 0, high: last.tests * 1.02 },
    y: { label: 'distinct faults', low: 0, high: Math.max(1, last.distinct_faults) * 1.05 },
    draw: [{ kind: 'line', class: 'fault', points: [[0, 0], ...of('distinct_faults')] }],
    table: { heads: ['round', 'tests', 'distinct faults'], rows: rounds.map((r) => [r.number, whole(r.tests), whole(r.distinct_faults)]) },
  });
  if (!view.covers_neurons) {
    document.querySelector('nav a[href="#coverage"]').textContent = 'Rounds';
    return show('coverage', 'Faults by round', el('div', { class: 'charts' }, found()),
      note('The model has no hidden layers, so there are no neurons to cover.'));
  }
  show('coverage', 'Coverage by round', el('div', { class: 'charts' }, chart({
    title: 'Coverage by tests',
    text: `Share of neurons that have converged, after each of ${rounds.at(-1).number} rounds.`,
    x: { label: 'tests', low: 0, high: end * 1.02 },
    y: { label: 'converged', low: low > 0.8 ? floorTo(low) : 0, high: 1, format: (v) => `${short(100 * v)}%` },
    draw: [{ kind: 'line', points: of('coverage'), name: 'sampled neurons' }, { kind: 'dots', points: rounds.length < 60 ? of('coverage') : [] },
      { kind: 'line', class: 'second', points: of('coverage_all'), name: 'all neurons' },
      ...(spread ? [{ kind: 'limits', points: [[last.tests, spread.low, spread.high]] }] : []),
      ...(isNear ? [{ kind: 'line', class: 'forecast', points: [[last.tests, coverage.sampled], [end, reached]], name: 'forecast' }] : [])],
    table: { heads: ['round', 'tests', 'sampled', 'all', 'distinct faults', 'seconds'], rows: rounds.map((r) =>
      [r.number, whole(r.tests), percent(r.coverage), percent(r.coverage_all), whole(r.distinct_faults), r.seconds.toFixed(1)]) },
  }), found()),
  note([`${many(view.counts.neurons, 'neuron')} in ${many(view.counts.layers, 'layer')}, ${whole(coverage.dead)} of them dead and ${
    whole(coverage.unseen)} not yet moved. `,
  spread ? `The final coverage of all neurons is ${percent(coverage.all)} (${interval(spread, 1)}, by resampling seeds).` : 'The interval is computed when the campaign ends.',
    isNear ? ` It takes ${forecast(coverage.forecast)} to reach the goal of ${percent(view.goal)}.` : '',
    coverage.caution ? ` Attention: ${coverage.caution}.` : '',
    coverage.uniform === null || coverage.uniform === undefined ? '' : ` The uniform stream alone covers ${percent(coverage.uniform)}.`].join('')));
}

function drawLayers(view) {
  if (!view.covers_neurons) return setHidden('layers', true);
  const most = Math.max(1e-12, ...view.layers.map((l) => (l.sensitivity ? l.sensitivity.high : 0)));
  show('layers', 'Coverage and sensitivity by layer', view.layers.length ? scrolling('Layers', table(
    'The sensitivity is the mean over the neurons of a layer, with a line from the 5th to the 95th percentile. The share in faults is the layer’s share of the sensitivity, averaged over faults.',
    ['layer', 'neurons', 'coverage', 'mean sensitivity', 'share in faults'],
    view.layers.map((l) => [l.name, whole(l.neurons),
      l.coverage === null ? '–' : bar(l.coverage, percent(l.coverage)),
      l.sensitivity ? bar(l.sensitivity.mean / most, number(l.sensitivity.mean), [l.sensitivity.low / most, l.sensitivity.high / most]) : '–',
      l.share === null ? '–' : bar(l.share, percent(l.share))]), { class: 'layers' })) : note('The layers are not known yet.'));
}

function drawNormality(view) {
  if (!view.covers_neurons) return setHidden('normality', true);
  const of = view.normality;
  show('normality', 'Normality of the sensitivities', of ? [el('p', {}, of.sentence), scrolling('Normality', table(
    `Medians over ${many(of.n_neurons, 'sampled neuron')} (${whole(of.n_unmoved)} more have no spread). A normal distribution has a skewness and an excess kurtosis of 0.`,
    ['differences', 'skewness', 'excess kurtosis', 'close to normal'],
    [['signed', number(of.skewness_signed, 2), number(of.kurtosis_signed, 2), bar(of.compatible_signed, percent(of.compatible_signed, 0))],
      ['absolute (sensitivities)', number(of.skewness_absolute, 2), number(of.kurtosis_absolute, 2), bar(of.compatible_absolute, percent(of.compatible_absolute, 0))]]))]
    : note('Available when the campaign has ended, if it ran at least 20 uniform tests.'));
}

function drawTime(view) {
  const s = view.seconds;
  if (!s) return show('time', 'Time by phase', note('Not known yet.'));
  const rest = Math.max(0, s.total - s.measure - s.judge - s.search);
  const rows = [['measure', s.measure], ['judge', s.judge], ['search', s.search], ['other (setup, disk)', rest]];
  const kinds = Object.entries(view.kinds);
  show('time', 'Time by phase', el('div', { class: 'beside' }, scrolling('Time', table(`${seconds(s.total)} for ${
    many(view.counts.tests, 'test')} (${whole(view.counts.passes)} ${view.counts.passes === 1 ? 'pass' : 'passes'}), ${whole(Math.round(view.counts.tests / Math.max(s.total, 1e-9)))} tests per second.`,
    ['phase', 'share', 'time'], rows.map(([name, spent]) => [name, bar(spent / Math.max(s.total, 1e-9), percent(spent / Math.max(s.total, 1e-9), 0)), seconds(spent)]))),
  kinds.length ? scrolling('Kinds of proposal', table('Tests by kind of proposal.', ['kind', 'tests', 'faults', 'faults per test'],
    kinds.map(([name, k]) => [name, whole(k.tests), whole(k.faults), percent(k.tests ? k.faults / k.tests : 0)]))) : null));
}

function drawReproduce(view) {
  const folded = (name, rows) => el('details', { 'data-key': name, class: 'data' }, el('summary', {}, name),
    scrolling(name, table(name, ['name', 'value'], rows, { class: 'plain' })));
  show('reproduce', 'Configuration, environment and reproduction',
    el('h3', {}, 'How to reproduce'), el('div', {}, view.reproduce.map((each) => command(each.command, each.purpose))),
    view.reproduce.length ? null : note('The run was started from Python: run that script again to reproduce it.'),
    folded('Configuration', view.config), folded('Environment', view.environment),
    folded('Theta', view.theta.map((t) => [t.name, `${number(t.low)} to ${number(t.high)} ${t.unit || ''}, identity ${number(t.identity)}`])));
}
