// In place of csrc/include/pdl.cuh: on a host a kernel begins when the one ahead has ended.
#pragma once

namespace lamina {

inline void wait_for_predecessor() {}
inline void start_successor() {}

template <typename Body>
void rehearse(const Body& body) {
  body(false);
  body(true);
}

}  // namespace lamina
