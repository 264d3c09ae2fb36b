// Runs before the first paint, so that a chosen theme does not flash.
try {
  const theme = localStorage.getItem("naiad.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is off: the system's theme holds.
}
