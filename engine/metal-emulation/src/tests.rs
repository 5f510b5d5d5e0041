//! Right kernels compute their sums, and each planted fault is found, in each order of threads.

use super::*;

/// The sum of 64 numbers by two simdgroups.
const SUM: &str = "
SHARED(float, parts, 2);
const uint own = thread_position_in_threadgroup.x;
const float part = simd_sum(x[threadgroup_position_in_grid.x * 64 + own]);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = part;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (own == 0) y[threadgroup_position_in_grid.x] = parts[0] + parts[1];
";

const ORDERS: [Order; 4] =
    [Order::Ascending, Order::Descending, Order::Random(1), Order::Random(2)];

/// Sums of two threadgroups, in one order after another. Launches are serialized, because the order is the process's.
fn sums(body: &str) -> Vec<Result<Vec<f32>, String>> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let launch = compile("", body, &[["float", "x"]], &[["float", "y"]]).unwrap();
    let x: Vec<u8> = (0..128u8).flat_map(|i| f32::from(i).to_ne_bytes()).collect();
    let run = |order| {
        set_order(order);
        let mut y = [0u8; 8];
        launch(&[&x], &mut [&mut y], [128, 1, 1], [64, 1, 1])?;
        Ok(y.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
    };
    ORDERS.into_iter().map(run).collect()
}

#[test]
fn a_kernel_sums_in_every_order() {
    for sum in sums(SUM) {
        assert_eq!(sum.unwrap(), [2016.0, 6112.0]);
    }
}

/// Replaces a part of the kernel, and expects `fault` in every order.
fn expect(part: &str, other: &str, fault: &str) {
    assert!(SUM.contains(part));
    for result in sums(&SUM.replace(part, other)) {
        let problem = result.unwrap_err();
        assert!(problem.contains(fault), "{problem}");
    }
}

#[test]
fn faults_are_found() {
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    expect(barrier, "", "without a barrier");
    expect(barrier, &format!("if (own < 32) {barrier}"), "do not reach a barrier");
    let divergent = "(own % 2 == 0 ? simd_sum(x[own]) : 0.0f)";
    expect(
        "simd_sum(x[threadgroup_position_in_grid.x * 64 + own])",
        divergent,
        "do not reach a collective",
    );
    expect("parts[1];", "parts[2];", "out of bounds");
    expect(
        "parts[simdgroup_index_in_threadgroup] = part;",
        "parts[0] = part;",
        "without a barrier",
    );
    expect(
        "y[threadgroup_position_in_grid.x] =",
        "y[2 * threadgroup_position_in_grid.x] =",
        "beside its elements",
    );
    expect("y[threadgroup_position_in_grid.x] =", "y[0] =", "was not written");
}

#[test]
fn a_read_beside_an_input_is_not_a_number() {
    for result in sums(&SUM.replace("* 64 + own", "* 64 + own + 1")) {
        let sum = result.unwrap();
        assert!(sum[0].is_finite() && sum[1].is_nan(), "{sum:?}");
    }
}

#[test]
fn a_text_that_does_not_compile_says_why() {
    let Err(problem) = compile("", "missing();", &[], &[]) else { panic!("it compiles") };
    assert!(problem.contains("missing"), "{problem}");
}
