// Appends the newest keys and values of several spans to their buffers. A threadgroup has one head of one row, a thread one
// dimension of it.
//
// Constants: D, T. BUFFER(i) is the buffer of the i-th span, which MLX declares as an input. `kv` has the new keys and values
// of all rows of a pass, heads first. `numbers` has the number of spans, the rows of `kv`, and SPAN numbers for each span: its
// first row in the grid, its first row in `kv`, the capacity of its buffer, and the rows in it.
constexpr int SPAN = 4;
const int head = int(threadgroup_position_in_grid.y), row = int(threadgroup_position_in_grid.z);
const int i = int(thread_position_in_threadgroup.x);
int span = 0;
while (span + 1 < numbers[0] && row >= numbers[2 + SPAN * (span + 1)]) span++;
const int at = 2 + SPAN * span, nth = row - numbers[at];
device T* buffer = (device T*)(BUFFER(span));
buffer[(size_t(head) * numbers[at + 2] + numbers[at + 3] + nth) * D + i] =
    kv[(size_t(head) * numbers[1] + numbers[at + 1] + nth) * D + i];
// Kernels that read this come after the writes.
if (head == 0 && row == 0 && i < 8) written[i] = static_cast<T>(0.0f);
