//! Ranks that are processes, over MLX's own collectives: its ring of TCP connections, NCCL, or JACCL.
//!
//! MLX finds the other processes by environment variables, which whoever starts a process sets: `MLX_RANK`, and `MLX_HOSTFILE`
//! for a ring, `NCCL_HOST_IP`, `NCCL_PORT` and `MLX_WORLD_SIZE` for NCCL. A process can join one group, once: after an error it
//! has to end. No call here has a deadline, and a ring trusts whoever connects, so a supervisor watches the processes and
//! opens connections only between those that it knows.
//!
//! # Why
//! MLX evaluates a graph in an order of its own. Two sums that do not depend on one another, such as those of layers side by
//! side, could be evaluated in one order here and in another there, and the ranks would add what does not belong together. So
//! each collective depends on the one that was made before it.

#![allow(unsafe_code, reason = "calls mlx-c for collectives, which mlx-rs lacks")]

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use mlx_rs::{Array, Stream};
use mlx_sys::{mlx_array, mlx_distributed_group, mlx_stream};
use parking_lot::Mutex;

use super::{Exchange, Ranks};
use crate::error::{Error, Result};
use crate::lazy::is_available;

/// What carries the arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// TCP connections from each process to the next; on CPUs, also of machines with other devices.
    Ring,
    /// NVIDIA's library, between CUDA devices.
    Nccl,
    /// RDMA over Thunderbolt, between Macs.
    Jaccl,
}

impl Backend {
    fn name(self) -> &'static CStr {
        match self {
            Self::Ring => c"ring",
            Self::Nccl => c"nccl",
            Self::Jaccl => c"jaccl",
        }
    }

    /// The stream that its operations run on.
    fn stream(self) -> Stream {
        match self {
            Self::Ring | Self::Jaccl => Stream::cpu(),
            Self::Nccl => Stream::thread_local_or_default(),
        }
    }
}

/// Joins the group of processes that the environment names, and waits until all are there. A group of one is
/// [`Ranks::alone`].
///
/// # Errors
/// [`Error::Array`] if this MLX lacks the backend, or the environment does not name the group.
pub fn join(backend: Backend) -> Result<Ranks> {
    let (name, mut handle) = (backend.name(), mlx_distributed_group::default());
    // SAFETY: the name is that of a backend, and lives as long as the process. The function fills the handle, or returns
    // another status than 0.
    let has_joined = unsafe {
        mlx_sys::mlx_distributed_is_available(name.as_ptr())
            && mlx_sys::mlx_distributed_init(&mut handle, true, name.as_ptr()) == 0
    };
    if !has_joined {
        return Err(Error::Array(format!(
            "cannot join a group of ranks by {name:?}: this MLX lacks it, or MLX_RANK and its other variables are not set"
        )));
    }
    // SAFETY: the handle was just filled.
    let (index, count) = unsafe {
        (mlx_sys::mlx_distributed_group_rank(handle), mlx_sys::mlx_distributed_group_size(handle))
    };
    let group = Group { handle, backend, last: Mutex::new(None) };
    match count {
        1 => Ok(Ranks::alone()),
        _ => Ok(Ranks::new(index, count, Arc::new(group))),
    }
}

/// A function of mlx-c that makes a collective.
type Collective =
    unsafe extern "C" fn(*mut mlx_array, mlx_array, mlx_distributed_group, mlx_stream) -> c_int;

/// The processes, as MLX knows them.
#[derive(Debug)]
struct Group {
    handle: mlx_distributed_group,
    backend: Backend,
    /// The result of the collective that was made last.
    last: Mutex<Option<Array>>,
}

// SAFETY: MLX keeps its group as long as the process lives, and changes nothing of it when a collective is made.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Group {
    fn make(&self, x: &Array, collective: Collective) -> Result<Array> {
        let mut last = self.last.lock();
        let x = match &*last {
            Some(last) if !is_available(last) => after(x, last)?,
            _ => x.clone(),
        };
        let (stream, mut res) = (self.backend.stream(), mlx_array::default());
        // SAFETY: the handles are those of a living array, group and stream. The function fills `res` with a new array and
        // returns 0, or returns another status and leaves it empty.
        let status = unsafe { collective(&mut res, x.as_ptr(), self.handle, stream.as_ptr()) };
        if status != 0 {
            return Err(Error::Array(format!(
                "ranks cannot exchange {:?} of {:?}",
                x.dtype(),
                x.shape()
            )));
        }
        // SAFETY: just filled, and nothing else owns it.
        let y = unsafe { Array::from_ptr(res) };
        *last = Some(y.clone());
        Ok(y)
    }
}

impl Exchange for Group {
    fn sum(&self, x: &Array) -> Result<Array> {
        self.make(x, mlx_sys::mlx_distributed_all_sum)
    }

    fn gather(&self, x: &Array) -> Result<Array> {
        self.make(x, mlx_sys::mlx_distributed_all_gather)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: the handle is not used any more. MLX keeps the group itself.
        unsafe { mlx_sys::mlx_distributed_group_free(self.handle) };
    }
}

/// `x`, which is evaluated after `earlier`.
fn after(x: &Array, earlier: &Array) -> Result<Array> {
    let mut res = mlx_array::default();
    // SAFETY: the vectors are of living arrays, are filled or left empty by each call, and freed once. The array taken from
    // one is a reference of its own.
    let status = unsafe {
        let inputs = mlx_sys::mlx_vector_array_new_value(x.as_ptr());
        let dependencies = mlx_sys::mlx_vector_array_new_value(earlier.as_ptr());
        let mut outputs = mlx_sys::mlx_vector_array_new();
        let mut status = mlx_sys::mlx_depends(&mut outputs, inputs, dependencies);
        if status == 0 {
            status = mlx_sys::mlx_vector_array_get(&mut res, outputs, 0);
        }
        for vector in [inputs, dependencies, outputs] {
            mlx_sys::mlx_vector_array_free(vector);
        }
        status
    };
    if status != 0 {
        return Err(Error::Array("MLX cannot order the collectives".into()));
    }
    // SAFETY: just filled, and nothing else owns it.
    Ok(unsafe { Array::from_ptr(res) })
}
