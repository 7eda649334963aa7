// The page of a run: its title, and the sections that draw the view.
const heading = (view) => `${view.perturbation} on ${view.subject}`;
const SECTIONS = [drawVerdict, drawNumbers, drawGates, drawGallery, drawMatrix, drawStrength, drawClasses, drawReproduce, drawCoverage, drawLayers,
  drawTime, drawNormality];
