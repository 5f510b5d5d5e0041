//! Writes the guest of `tests/slow_policy.py`, which uses nearly all of its fuel at every step.

fn main() -> std::io::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "counting.wasm".into());
    std::fs::write(path, steersman_test_support::hostile::counting(1_900_000))
}
