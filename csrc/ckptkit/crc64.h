// CRC-64 with the polynomial of CRC-64/NVME, register from 0, no final inversion: the sum that certificates are made of.
//
// Bytes are a polynomial over GF(2), least significant bit of the first byte first; its CRC is that times x^64, modulo P. So
// it is additive: the CRC of A followed by B is CRC(A) * x^(8 * bytes of B) + CRC(B), where + is exclusive or. P is
// primitive: no two bits of less than 2^64 - 1 weigh the same.
// Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation Using PCLMULQDQ Instruction", Intel 2009.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ckptkit {

bool has_carryless();  // whether this CPU multiplies without carry

uint64_t crc64(const uint8_t* data, size_t size, bool carryless = has_carryless());
// a * b modulo P; bit 63 is the coefficient of x^0.
uint64_t crc64_multiply(uint64_t a, uint64_t b, bool carryless = has_carryless());
// x^(8 * bytes) modulo P, for less than 2^60 bytes.
uint64_t crc64_shift(uint64_t bytes);

}  // namespace ckptkit
