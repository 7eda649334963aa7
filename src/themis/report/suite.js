// The page of a suite: its title, and its sections by id.
const heading = (view) => view.title;
const SECTIONS = {
  verdict: ['Verdict', drawVerdict],
  numbers: ['Key figures', drawNumbers],
  gates: ['Gates', drawGates],
  members: ['Perturbations', drawMembers],
  levels: ['Severity', drawLevels],
  classes: ['Classes', drawClasses],
  slices: ['Slices', drawSlices],
  pictures: ['Pictures', drawPictures],
  budget: ['Budget', drawBudget],
  reproduce: ['Reproduce', drawReproduce],
};
const range = (e) => (e ? `${percent(e.low)} to ${percent(e.high)}` : '–');
const ends = (pair) => (pair ? `95%: ${percent(pair[0])} to ${percent(pair[1])}` : '');
const bracketed = (pair) => (pair ? ` (${ends(pair)})` : '');
const listed = (...texts) => texts.filter(Boolean).join('; ');
const title = (name) => name.replaceAll('_', ' ');

function drawVerdict(view) {
  show('verdict', 'Verdict', el('p', { class: `verdict ${view.tone}` }, view.verdict),
    view.gates ? el('p', { class: 'stop' }, view.gates.sentence) : null,
    view.sentences.map((text) => el('p', { class: 'stop' }, text)),
    view.fault ? note(`A fault is ${view.fault}.`) : null, view.notes.map(note),
    view.next ? el('div', {}, command(view.next.command, `Next: ${view.next.purpose.toLowerCase()}`)) : null);
}

function drawNumbers(view) {
  const errors = view.corruption_errors;
  const graded = view.level_seeds ? `of ${whole(view.level_seeds)} seeds, over all levels` : '';
  show('numbers', 'Key figures', el('dl', { class: 'tiles' },
    view.mean_error ? figure('Error under corruption', percent(view.mean_error.value), listed(interval(view.mean_error, 1), `${percent(view.clean_error)} on clean inputs`), graded) : null,
    view.mean_score !== null ? figure('Mean score (mPC)', view.mean_score.toFixed(3),
      `${percent(view.relative_score)} of the clean score (rPC)`,
      `${view.score_name}, averaged over levels, then over perturbations`) : null,
    errors ? figure('mCE', percent(errors.mce), ends(errors.mce_interval), `100% are the errors of ${errors.baseline}`) : null,
    view.is_only_graded ? null : figure('Distinct faults', whole(view.distinct_faults), `under ${whole(view.members.filter((m) => m.faults).length)} of ${many(view.members.length, 'perturbation')}`,
      'one per seed, perturbation and wrong outcome'),
    view.is_only_graded ? figure('Passes', whole(view.passes), `in ${seconds(view.seconds)}`)
      : figure('Tests', whole(view.tests), `${whole(view.passes)} passes`, `in ${seconds(view.seconds)}`),
    view.is_only_graded ? null : figure('Seeds', whole(view.seeds), 'answered correctly when clean', `clean inputs were run once: ${whole(view.clean_passes)} passes`)));
}

function drawMembers(view) {
  const heads = ['Perturbation', 'Fault rate', '95% interval', 'Error at levels', 'Weakest fault', 'Distinct faults', 'Tests', 'Time'];
  const rate = (m) => (m.fault_rate ? bar(m.fault_rate.value, percent(m.fault_rate.value), [m.fault_rate.low, m.fault_rate.high]) : '–');
  const named = (m) => {
    const link = view.reports[m.name] ? el('a', { href: view.reports[m.name] }, title(m.name)) : title(m.name);
    return [link, el('span', { class: 'quiet under' }, m.range)];
  };
  if (view.is_only_graded) {
    const errors = view.members.map((m) => [`${title(m.name)}: ${m.range}`, `${percent(m.error)}${bracketed(m.error_interval)}`]);
    return show('members', 'Perturbations', scrolling('Perturbations', table('Errors on average over the levels.', ['perturbation', 'error'], errors)));
  }
  const rows = view.members.map((m) => [named(m), rate(m), range(m.fault_rate), m.error === null ? percent(m.error) : `${percent(m.error)}${bracketed(m.error_interval)}`,
    m.weakest === null ? 'none' : m.weakest_theta, whole(m.distinct_faults), whole(m.tests), m.tests ? seconds(m.seconds) : '–']);
  const numbers = [2, 3, 4, 5, 6, 7];
  const cell = (value, k) => (k ? el('td', { class: numbers.includes(k) ? 'number' : null }, value) : el('th', { scope: 'row' }, ...[value].flat()));
  show('members', 'Perturbations', scrolling('Perturbations', el('table', { class: 'members' },
    el('caption', {}, 'Fault rates are those of random disturbances in the range below the name, on seeds that are answered correctly when ' +
      'clean; the highest rates come first. The weakest fault is the smallest disturbance that was found to break an answer.'),
    el('thead', {}, el('tr', {}, heads.map((head, k) => el('th', { scope: 'col', class: numbers.includes(k) ? 'number' : null }, head)))),
    el('tbody', {}, rows.map((row) => el('tr', {}, row.map(cell)))))),
    Object.keys(view.reports).length ? note('A name links to the report of that perturbation, in its folder beside this page.') : null);
}

// A share as a cell of a heat map; the deepest colour stands for one half and more.
function heat(share, label) {
  if (share === null || share === undefined) return el('td', { class: 'none' }, '·');
  const level = Math.min(5, Math.ceil(share * 10));
  return el('td', { class: level ? `heat heat${level}` : 'none', title: label }, share < 0.005 ? '0' : String(Math.round(100 * share)));
}

function heatMap(caption, corner, heads, rows) {
  const isTall = heads.some((head) => head.length > 4);
  return scrolling(caption, el('table', { class: isTall ? 'matrix tall named' : 'matrix named' }, el('caption', {}, caption),
    el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, corner), heads.map((head) => el('th', { scope: 'col' }, el('span', {}, head))))),
    el('tbody', {}, rows.map(([name, cells]) => el('tr', {}, el('th', { scope: 'row' }, title(name)), cells)))));
}

function drawLevels(view) {
  if (!view.levels.length) return show('levels', 'Errors by severity', note('No perturbation of this suite is graded at fixed levels.'));
  const most = Math.max(...view.levels.map((row) => row.errors.length));
  const heads = [...Array(most).keys()].map((k) => String(k + 1));
  const mean = (row) => row.errors.reduce((sum, e) => sum + e.value, 0) / row.errors.length;
  const cell = (e, level) => (e ? heat(e.value, `${level}: ${percent(e.value)} (${range(e)})`) : heat(null));
  const rows = view.levels.map((row) => [row.member, [...heads.map((_, k) => cell(row.errors[k], row.levels[k])),
    heat(mean(row), `mean: ${percent(mean(row))}${row.mean ? ` (${range(row.mean)})` : ''}`)]]);
  const table95 = el('details', { class: 'data', 'data-key': 'intervals' }, el('summary', {}, 'Errors with their 95% intervals'),
    scrolling('Errors with their 95% intervals', table('Each seed counts once, also in a mean over levels.', ['perturbation', 'level', 'error', '95% interval'],
      view.levels.flatMap((row) => [...row.errors.map((e, k) => [title(row.member), row.levels[k], percent(e.value), range(e)]),
        [title(row.member), 'mean', percent(mean(row)), range(row.mean)]]))));
  const notes = new Map(view.members.map((m) => [m.name, m.note]));
  const about = view.levels.filter((row) => notes.get(row.member)).map((row) => [title(row.member), row.levels.join('; '), notes.get(row.member)]);
  const details = about.length ? el('details', { class: 'data', 'data-key': 'levels' }, el('summary', {}, 'What the severities are, and how close to the published ones'),
    scrolling('Severities', table('Severities', ['perturbation', 'levels 1 to 5', 'how close'], about))) : null;
  show('levels', 'Errors by severity',
    heatMap(`Percentage of ${whole(view.level_seeds)} seeds answered wrongly at each level, ${percent(view.clean_error)} on clean inputs.`,
      'level', [...heads, 'mean'], rows), table95, details);
}

function drawClasses(view) {
  if (view.is_only_graded) return setHidden('classes', true);
  const classes = (m) => m.slices.filter((s) => s.column === 'class');
  const members = view.members.filter((m) => classes(m).length);
  if (!members.length) return show('classes', 'Fault rates by class', note('No fault rate by class is known.'));
  const cell = (m, s) => (s.fault_rate ? heat(s.fault_rate.value, `${title(m.name)}, ${s.value}: ${percent(s.fault_rate.value)} of ${many(s.tests, 'test')} (${range(s.fault_rate)})`) : heat(null));
  const rows = members.map((m) => [m.name, classes(m).map((s) => cell(m, s))]);
  show('classes', 'Fault rates by class', heatMap('Percentage of random disturbances that fail, by class.', 'class', classes(members[0]).map((s) => s.value), rows));
}

function drawSlices(view) {
  if (view.is_only_graded) return setHidden('slices', true);
  const rows = view.slices.map(({ member, rate, overall }) => [`${rate.column} ${rate.value}`, title(member), percent(rate.fault_rate.value), range(rate.fault_rate), percent(rate.at_least),
    percent(overall.value), whole(rate.tests)]);
  show('slices', 'Worst slices', rows.length
    ? scrolling('Worst slices', table('Slices that fail clearly more often than all seeds under the same perturbation: the lower ends hold for all slices of one perturbation together.',
      ['slice', 'perturbation', 'fault rate', '95% interval', 'at least', 'all seeds', 'tests'], rows))
    : note('No slice fails clearly more often than the seeds as a whole.'));
}

function drawPictures(view) {
  if (view.is_only_graded) return setHidden('pictures', true);
  const shown = view.pictures.filter((p) => p.disturbed);
  const frame = (uri, text) => el('figure', {}, el('div', { class: 'frame' }, el('img', { src: uri, alt: text })), el('figcaption', {}, text));
  const cards = shown.map((p) => el('article', { class: 'card' }, el('h3', {}, title(p.member)),
    el('div', { class: 'pictures pair' }, p.clean ? frame(p.clean, p.before || 'clean') : null, frame(p.disturbed, p.after)),
    el('p', { class: 'quiet' }, p.text)));
  show('pictures', 'What breaks the model', shown.length ? note('For each perturbation the most telling fault: a small change and a confident wrong answer.')
    : note('No fault has a picture.'), el('div', { class: 'cards small' }, cards));
}

function drawBudget(view) {
  if (view.is_only_graded) return setHidden('budget', true);
  const steps = new Map(view.members.map((m) => [m.name, { share: 0, discovery: 0, uncertainty: 0, last: 0 }]));
  for (const step of view.schedule) {
    const of = steps.get(step.member);
    of[step.reason] += step.max_tests - of.last;
    of.last = step.max_tests;
  }
  const rows = [...steps].map(([name, of]) => [title(name), whole(of.share), whole(of.discovery), whole(of.uncertainty)]);
  show('budget', 'Where the tests went',
    note(`${percent(view.share, 0)} of the tests were divided by weight. The rest went in turn to the perturbation in which the next random ` +
      'test is most likely to show a new fault, and to the one whose fault rate was known worst.'),
    scrolling('Budget', table('Tests given to each perturbation, by reason.', ['perturbation', 'fixed share', 'new faults expected', 'rate uncertain'], rows)));
}

function drawReproduce(view) {
  show('reproduce', 'Configuration and reproduction', view.reproduce.map((each) => command(each.command, each.purpose)),
    el('details', { 'data-key': 'config', class: 'data' }, el('summary', {}, 'Configuration'),
      scrolling('Configuration', table('Configuration', ['name', 'value'], view.config, { class: 'plain' }))));
}
