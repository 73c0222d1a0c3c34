// Intel's tile instructions (AMX-TILE, AMX-INT8, AMX-BF16) on a processor that lacks them.
//
// Preloaded into a process, this library catches the fault that such an instruction raises, does
// what the Software Developer's Manual, volume 2, says, and continues after it. So the tests run
// the same library as machines with tiles (tests/kernels/test_amx.py). Whatever the manual forbids,
// such as shapes that do not fit together, stays a fault. At the end, the numbers of products are
// written to the file that AMX_EMULATOR_LOG names.
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <xmmintrin.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} Shapes;

static __thread Shapes shapes;
static __thread uint8_t tiles[8][16][64];
static _Atomic long integer_products, bfloat16_products;

// The instruction's fields; each register has the number that it has in machine code.
typedef struct {
  int prefix, opcode, mode, reg, rm, operand, length;
  uint8_t* address;  // of a memory operand
  int64_t stride;
} Instruction;

static int64_t general_register(const ucontext_t* context, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[order[number]];
}

// The memory operand of `i`, whose ModRM byte is at code[4].
static void read_address(const ucontext_t* context, const uint8_t* code, Instruction* i) {
  const int high_base = ~code[1] >> 2 & 8, high_index = ~code[1] >> 3 & 8;
  int base = i->rm | high_base;
  i->address = NULL, i->stride = 0;
  if (i->rm == 4) {
    const uint8_t sib = code[i->length++];
    const int index = (sib >> 3 & 7) | high_index;
    base = (sib & 7) | high_base;
    if (index != 4) i->stride = general_register(context, index) << (sib >> 6);
  }
  int32_t offset = 0;
  if (i->mode == 1) {
    offset = (int8_t)code[i->length++];
  } else if (i->mode == 2 || (base & 7) == 5) {
    memcpy(&offset, code + i->length, sizeof offset);
    i->length += 4;
  }
  int64_t start = offset;
  if (i->mode == 0 && i->rm == 5) {
    start += (int64_t)(code + i->length);  // relative to the next instruction
  } else if (i->mode != 0 || (base & 7) != 5) {
    start += general_register(context, base);
  }
  i->address = (uint8_t*)start;
}

// Whether the code is one of the tile instructions' encodings: three bytes of VEX in map 0F38 with
// W and L zero.
static int read_instruction(const ucontext_t* context, const uint8_t* code, Instruction* i) {
  if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84) != 0) return 0;
  i->prefix = code[2] & 3, i->operand = ~code[2] >> 3 & 15, i->opcode = code[3];
  i->mode = code[4] >> 6, i->reg = code[4] >> 3 & 7, i->rm = code[4] & 7, i->length = 5;
  if (i->mode != 3) read_address(context, code, i);
  return 1;
}

static int load_shapes(const uint8_t* address) {
  Shapes given;
  memcpy(&given, address, sizeof given);
  if (given.palette > 1 || given.start_row != 0) return 0;
  for (int i = 0; i < 14; ++i) {
    if (given.reserved[i] != 0) return 0;
  }
  for (int i = 0; i < 16; ++i) {
    if (given.bytes[i] > 64 || given.rows[i] > 16 || !given.bytes[i] != !given.rows[i]) return 0;
    if (i >= 8 && given.rows[i] != 0) return 0;
  }
  shapes = given;
  memset(tiles, 0, sizeof tiles);
  return 1;
}

static int usable(int tile) { return shapes.palette == 1 && tile < 8 && shapes.rows[tile] != 0; }

static int copy(const Instruction* i, int store) {
  if (!usable(i->reg) || i->rm != 4) return 0;
  if (!store) memset(tiles[i->reg], 0, sizeof tiles[i->reg]);
  for (int row = 0; row < shapes.rows[i->reg]; ++row) {
    uint8_t *memory = i->address + row * i->stride, *tile = tiles[i->reg][row];
    memcpy(store ? memory : tile, store ? tile : memory, shapes.bytes[i->reg]);
  }
  return 1;
}

static int shapes_fit(int sums, int left, int right) {
  return usable(sums) && usable(left) && usable(right) && sums != left && sums != right &&
         left != right && shapes.rows[sums] == shapes.rows[left] &&
         shapes.bytes[sums] == shapes.bytes[right] &&
         shapes.bytes[left] == 4 * shapes.rows[right] && shapes.bytes[sums] % 4 == 0;
}

// TDPBSSD and TDPBSUD: signed bytes by signed ones, or by unsigned ones.
static void multiply_integers(int sums, int left, int right, int is_unsigned) {
  for (int m = 0; m < shapes.rows[sums]; ++m) {
    for (int n = 0; n < shapes.bytes[sums] / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, &tiles[sums][m][4 * n], 4);
      for (int k = 0; k < shapes.bytes[left]; ++k) {
        const uint8_t byte = tiles[right][k / 4][4 * n + k % 4];
        sum += (uint32_t)((int8_t)tiles[left][m][k] * (is_unsigned ? byte : (int8_t)byte));
      }
      memcpy(&tiles[sums][m][4 * n], &sum, 4);
    }
  }
}

static float bfloat16(const uint8_t* bytes) {
  const uint32_t word = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

// TDPBF16PS: even and odd inputs are summed apart, and their sum is added.
static void multiply_bfloat16(int sums, int left, int right) {
  _mm_setcsr(0x9FC0);  // subnormals are zero; no exceptions; round to nearest, ties to even
  for (int m = 0; m < shapes.rows[sums]; ++m) {
    for (int n = 0; n < shapes.bytes[sums] / 4; ++n) {
      float partial[2] = {0, 0}, sum;
      for (int k = 0; k < shapes.bytes[left] / 2; ++k) {
        partial[k % 2] = fmaf(bfloat16(&tiles[left][m][2 * k]),
                              bfloat16(&tiles[right][k / 2][4 * n + k % 2 * 2]), partial[k % 2]);
      }
      memcpy(&sum, &tiles[sums][m][4 * n], 4);
      sum += partial[0] + partial[1];
      memcpy(&tiles[sums][m][4 * n], &sum, 4);
    }
  }
}

static int execute(const Instruction* i) {
  enum { kNone, k66, kF3, kF2 };
  const int key = i->opcode << 8 | i->prefix << 4 | (i->mode == 3);
  switch (key) {
    case 0x49 << 8 | kNone << 4:  // LDTILECFG
      return i->reg == 0 && load_shapes(i->address);
    case 0x49 << 8 | kNone << 4 | 1:  // TILERELEASE
      memset(&shapes, 0, sizeof shapes);
      return i->reg == 0 && i->rm == 0;
    case 0x49 << 8 | kF2 << 4 | 1:  // TILEZERO
      memset(tiles[i->reg], 0, sizeof tiles[i->reg]);
      return usable(i->reg) && i->rm == 0;
    case 0x4B << 8 | kF2 << 4:  // TILELOADD
      return copy(i, 0);
    case 0x4B << 8 | kF3 << 4:  // TILESTORED
      return copy(i, 1);
    case 0x5E << 8 | kF2 << 4 | 1:  // TDPBSSD
    case 0x5E << 8 | kF3 << 4 | 1:  // TDPBSUD
      if (!shapes_fit(i->reg, i->rm, i->operand)) return 0;
      multiply_integers(i->reg, i->rm, i->operand, i->prefix == kF3);
      ++integer_products;
      return 1;
    case 0x5C << 8 | kF3 << 4 | 1:  // TDPBF16PS
      if (!shapes_fit(i->reg, i->rm, i->operand)) return 0;
      multiply_bfloat16(i->reg, i->rm, i->operand);
      ++bfloat16_products;
      return 1;
  }
  return 0;
}

static void on_illegal_instruction(int number, siginfo_t* info, void* opaque) {
  (void)info;
  ucontext_t* context = opaque;
  Instruction i;
  const uint8_t* code = (const uint8_t*)context->uc_mcontext.gregs[REG_RIP];
  if (read_instruction(context, code, &i) && execute(&i)) {
    context->uc_mcontext.gregs[REG_RIP] += i.length;
  } else {
    signal(number, SIG_DFL);  // the instruction faults again, and ends the process
  }
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO};
  sigaction(SIGILL, &action, NULL);
}

__attribute__((destructor)) static void end(void) {
  const char* path = getenv("AMX_EMULATOR_LOG");
  FILE* file = path == NULL ? NULL : fopen(path, "w");
  if (file == NULL) return;
  fprintf(file, "%ld %ld\n", integer_products, bfloat16_products);
  fclose(file);
}
