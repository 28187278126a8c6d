// Texts whose contrast with what is behind them is below that of WCAG AA.
(() => {
  const parse = (color) => (color.match(/[\d.]+/g) || []).map(Number);
  const luminance = (color) => color.slice(0, 3)
    .map((value) => value / 255)
    .map((value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !element.offsetParent || element.closest(".none") || element.closest("svg")) continue;
    const shades = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
    const contrast = (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05);
    if (contrast < 4.5) found.push(`${element.className}: ${element.textContent.slice(0, 30)} ${contrast.toFixed(2)}`);
  }
  return found;
})()
