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
fn a_buffer_that_is_written_in_place_keeps_its_other_elements() {
    let body = "if (thread_position_in_grid.x == 40) ((device float*)x)[2] = 5; y[0] = 1;";
    let launch = compile("", body, &[], &[["in_place float", "x"], ["float", "y"]]).unwrap();
    let mut x: Vec<u8> = (0..4u8).flat_map(|i| f32::from(i).to_ne_bytes()).collect();
    launch(&[], &mut [&mut x, &mut [0; 4]], [64, 1, 1], [32, 1, 1]).unwrap();
    let floats: Vec<f32> = x.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
    assert_eq!(floats, [0.0, 1.0, 5.0, 3.0]);
    // Without the cast, it is a constant, as on a Mac.
    let body = "x[2] = 5; y[0] = 1;";
    assert!(compile("", body, &[], &[["in_place float", "x"], ["float", "y"]]).is_err());
}

#[test]
fn a_text_that_does_not_compile_says_why() {
    let Err(problem) = compile("", "missing();", &[], &[]) else { panic!("it compiles") };
    assert!(problem.contains("missing"), "{problem}");
}

/// What the check of types finds in [`SUM`] with `other` instead of `part`.
fn type_errors(part: &str, other: &str) -> String {
    assert!(SUM.contains(part));
    let [x, y] =
        [[["constant bfloat", "few"], ["bfloat", "x"]], [["float", "y"], ["bfloat", "rounded"]]];
    let body = format!("typedef bfloat T;\n{}", SUM.replace(part, other));
    let body = body.replace("simd_sum(x[", "simd_sum(static_cast<float>(x[").replace("]);", "]));");
    types::check("", &body, &x, &y).err().unwrap_or_default()
}

#[test]
fn wrong_types_are_found() {
    if types::version().unwrap().is_none() {
        eprintln!("skipped: there is no libclang");
        return;
    }
    assert_eq!(type_errors("", ""), "");
    let first = "SHARED(float, parts, 2);";
    let mut missed = Vec::new();
    for (added, fault) in [
        // A pointer to another address space than its own.
        ("const device T* p = few;", "const __constant bfloat *"),
        ("const constant T* p = x;", "const __global bfloat *"),
        ("const device float* p = parts;", "__local float[2]"),
        ("thread float* p = parts;", "__local float[2]"),
        // A pointer or a reference without one.
        ("const T* p = x;", "`const T*` has no address space"),
        ("float own_sum = 0; float* p = &own_sum;", "`float*` has no address space"),
        ("float own_sum = 0; float& p = own_sum;", "`float&` has no address space"),
        // A write to an input.
        ("x[0] = rounded[0];", "read-only variable is not assignable"),
        ("device T* p = x;", "const __global bfloat *"),
        // No bfloat without a cast: Apple's compiler refuses all but the last two.
        ("T sum = 1.0f;", "of type 'float'"),
        ("T sum = y[0];", "of type '__global float'"),
        ("rounded[0] = y[0];", "type '__global float'"),
        ("rounded[0] = 0;", "'int'"),
        ("float sum = x[0];", "const __global bfloat"),
        ("T sum = static_cast<T>(1.0f) * x[0];", "invalid operands"),
        // No number of 64 bits that is a float.
        ("double sum = 0;", "'double'"),
        // Two functions are as near.
        ("float root = rsqrt(2);", "ambiguous"),
        ("int least = min(1, 2u);", "ambiguous"),
        // Memory of the threadgroup in a block.
        ("if (y[0] > 0) { SHARED(float, more, 2); }", "outermost scope"),
        ("missing();", "undeclared identifier"),
    ] {
        let problem = type_errors(first, &format!("{first}\n{added}"));
        let is_found = problem.starts_with("line 4 of the ") && problem.contains(fault);
        if !is_found {
            missed.push(format!("{added} ({fault}): {problem}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    // Right, though it resembles what is wrong.
    for added in [
        "thread float* p = nullptr; float own_sum = 0; p = &own_sum;",
        "const device T* p = x + 1; const constant T* q = few; device float* r = y;",
        "threadgroup float* p = parts;",
        "int two = 2; float half_sum = y[0] * two; rounded[0] = static_cast<T>(half_sum);",
    ] {
        assert_eq!(type_errors(first, &format!("{first}\n{added}")), "", "{added}");
    }
}
