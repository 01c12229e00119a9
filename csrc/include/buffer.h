// Scratch memory that a thread keeps from call to call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace lamina {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // At least `count` floats, aligned to a cache line; new memory is zero, so that what a panel holds beyond its
  // data is never a NaN or a slow denormal left by somebody else.
  float* reserve(size_t count) {
    if (count > count_) {
      std::free(data_);
      count_ = (count + 15) / 16 * 16;
      data_ = static_cast<float*>(std::aligned_alloc(64, count_ * sizeof(float)));
      if (data_ == nullptr) {
        count_ = 0;
        throw std::bad_alloc();
      }
      std::memset(data_, 0, count_ * sizeof(float));
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace lamina
