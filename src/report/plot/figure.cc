#include "report/plot/figure.h"

#include "report/plot/axis.h"

namespace moebius {

void open_figure(Markup& out, const FigureText& text, double height) {
  out.open("figure", {{"id", text.id}});
  out.open("figcaption").element("h3", {}, text.title);
  if (!text.note.empty()) out.element("p", {{"class", "note"}}, text.note);
  out.close("figcaption");
  out.open("svg", {{"viewBox", "0 0 " + place_text(kFigureWidth) + " " + place_text(height)},
                   {"role", "img"},
                   {"tabindex", "0"},
                   {"aria-labelledby", text.id + "-title " + text.id + "-desc"}});
  out.element("title", {{"id", text.id + "-title"}}, text.title);
  out.element("desc", {{"id", text.id + "-desc"}}, text.description);
}

void close_figure(Markup& out, const std::string& data) {
  out.close("svg");
  if (!data.empty()) out.open("script", {{"type", "application/json"}}).add(data).close("script");
  out.close("figure");
}

}  // namespace moebius
