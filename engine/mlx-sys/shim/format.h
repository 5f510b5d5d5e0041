// std::format for standard libraries without it (gcc 12); the build includes it only if needed.
// Supports what mlx-c uses: `{}` for anything that can be written to a stream.

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
