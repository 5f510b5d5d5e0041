// std::format for compilers whose library has none (gcc 12); used only where the build finds it so.
// Knows what mlx-c asks of it: `{}`, for anything that a stream takes.

#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace std {

template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  auto put = [&](const auto& value) {
    const auto brace = text.find("{}");
    out << text.substr(0, brace);
    if (brace == string_view::npos) {
      text = {};
    } else {
      out << value;
      text.remove_prefix(brace + 2);
    }
  };
  (put(args), ...);
  out << text;
  return out.str();
}

} // namespace std
