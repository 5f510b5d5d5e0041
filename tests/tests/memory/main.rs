//! Bytes that the process holds. MLX counts the arrays of the whole process, so these tests are a program of their own
//! and run one at a time.

mod counted;
mod limit;
mod on_demand;

use tokio::sync::Mutex;

/// Held by the test that runs. It is an asynchronous lock, since some of the tests are asynchronous.
static ALONE: Mutex<()> = Mutex::const_new(());
