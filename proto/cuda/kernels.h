// The two kernels of self-tests and checks, as text that the driver compiles itself (PTX): what a
// device may read and store shows only in a kernel. They run in processes that may lose their
// context. cuda_kernels_check compiles them where there is a toolkit.
#pragma once

namespace modelhost::cuda {

// modelhost_poke(a): *(uint32_t*)a = 0xdeadbeef.  modelhost_peek(a, b): *(uint64_t*)b =
// *(uint64_t*)a.
inline constexpr char kKernels[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry modelhost_poke(.param .u64 to)
{
  .reg .u64 %a<3>;
  .reg .u32 %v;
  ld.param.u64 %a1, [to];
  cvta.to.global.u64 %a2, %a1;
  mov.u32 %v, 0xDEADBEEF;
  st.global.u32 [%a2], %v;
  ret;
}
.visible .entry modelhost_peek(.param .u64 from, .param .u64 to)
{
  .reg .u64 %a<3>;
  .reg .u64 %b<3>;
  .reg .u64 %v;
  ld.param.u64 %a1, [from];
  ld.param.u64 %b1, [to];
  cvta.to.global.u64 %a2, %a1;
  cvta.to.global.u64 %b2, %b1;
  ld.global.u64 %v, [%a2];
  st.global.u64 [%b2], %v;
  ret;
}
)";
inline constexpr char kPokeKernel[] = "modelhost_poke";
inline constexpr char kPeekKernel[] = "modelhost_peek";

}  // namespace modelhost::cuda
