/* Sphinx's scores, and more for a page that has the words asked for in its title. */
var asked = () => new URLSearchParams(location.search).get("q").toLowerCase().split(/\W+/);
var Scorer = {
  score: ([, title, , , score]) => score + 5 * title.toLowerCase().split(/\W+/).filter((word) => asked().includes(word)).length,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
