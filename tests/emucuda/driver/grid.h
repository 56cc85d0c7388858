// Running the blocks of a launch.
#pragma once
#include <string>
#include <vector>

#include "../kernel/kernel_abi.h"
#include "state.h"

namespace emu {

struct GridLaunch {
  const Kernel* kernel;
  Dim grid, block;
  unsigned dynamic_shared;
  std::vector<char> parameters;
  std::vector<char*> globals;
};
Failure run_grid(const GridLaunch&, const Actor&);
void register_cubin(const void* cubin, const std::string& folder);  // locked

}  // namespace emu
