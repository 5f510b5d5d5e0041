//! The environment by which MLX finds the ranks of a group, and free ports for them.

use std::env;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use steersman_rank_control::Addresses;

use super::Over;

/// Which rank a process is.
const RANK: &str = "MLX_RANK";

/// Where a ring finds its processes: a file with their addresses.
const HOSTS: &str = "MLX_HOSTFILE";

/// Where processes with NCCL find the first of them, and how many they are.
const NCCL_HOST: &str = "NCCL_HOST_IP";
const NCCL_PORT: &str = "NCCL_PORT";
const SIZE: &str = "MLX_WORLD_SIZE";

/// The devices that a process sees.
const DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The addresses of a group in a file for MLX's ring, which is removed on drop.
pub struct Hosts(PathBuf);

impl Hosts {
    /// Writes the addresses of all ranks, in their order.
    ///
    /// # Errors
    /// If the file in `folder` cannot be written.
    pub fn write(folder: &Path, addresses: &[String]) -> Result<Self> {
        let lists: Vec<[&String; 1]> = addresses.iter().map(|address| [address]).collect();
        let file = folder.join(format!("ranks-{}.json", std::process::id()));
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&file, serde_json::to_string(&lists)?))
            .with_context(|| format!("writing {}", file.display()))?;
        Ok(Self(file))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Sets what MLX reads in the process of `rank`, where `addresses` are those of all ranks and `hosts` has them in a file. With
/// NCCL it has the device with this number of this machine.
///
/// # Errors
/// If the rank has no GPU, or the first one's address is none.
pub fn set(
    command: &mut Command,
    over: Over,
    rank: usize,
    device: usize,
    addresses: &[String],
    hosts: &Hosts,
) -> Result<()> {
    command.env(RANK, rank.to_string());
    match over {
        Over::Ring => {
            command.env(HOSTS, &hosts.0);
        }
        Over::Nccl => {
            let first = addresses.first().and_then(|first| first.rsplit_once(':'));
            let (host, port) = first.context("the first rank has no address")?;
            command.env(NCCL_HOST, host).env(NCCL_PORT, port);
            // A process that sees the other's device uses it in its streams.
            let device = name_of(env::var(DEVICES).ok().as_deref(), device)?;
            command.env(SIZE, addresses.len().to_string()).env(DEVICES, device);
        }
    }
    Ok(())
}

/// The name of a device among those that are `visible` to the parent: all, if it has no list.
fn name_of(visible: Option<&str>, device: usize) -> Result<String> {
    let Some(visible) = visible else { return Ok(device.to_string()) };
    let mut listed = visible.split(',').map(str::trim).filter(|device| !device.is_empty());
    listed.nth(device).map(Into::into).with_context(|| {
        format!(
            "rank {device} of this machine has no GPU: {DEVICES} is {visible}; list as many GPUs as there are ranks"
        )
    })
}

/// The address of this machine for ranks of this machine alone.
pub const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Addresses at `host`, which is one of this machine, for `count` ranks and their log, whose ports nobody listens to until
/// somebody takes them.
///
/// # Errors
/// If there are none.
pub fn free_addresses(host: IpAddr, count: usize) -> Result<Addresses> {
    let listeners = (0..=count).map(|_| TcpListener::bind((host, 0)));
    let listeners: Vec<_> =
        listeners.collect::<std::io::Result<_>>().context("finding free ports")?;
    let address = |listener: &TcpListener| Ok(listener.local_addr()?.to_string());
    let mut ranks: Vec<_> = listeners.iter().map(address).collect::<Result<_>>()?;
    let log = ranks.pop().expect("there is one more than ranks");
    Ok(Addresses { ranks, log })
}

/// A port of all addresses of this machine, to which nobody listens until somebody takes it.
///
/// # Errors
/// If there is none.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("finding a free port")?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_one_of_the_devices_that_its_parent_sees() {
        assert_eq!(name_of(None, 3).unwrap(), "3");
        assert_eq!(name_of(Some("2, GPU-5f,7"), 1).unwrap(), "GPU-5f");
        let error = name_of(Some("2"), 1).unwrap_err().to_string();
        assert!(
            error.contains("rank 1 of this machine has no GPU: CUDA_VISIBLE_DEVICES is 2"),
            "{error}"
        );
    }

    #[test]
    fn a_ring_reads_a_list_for_each_rank_until_the_group_ends() {
        let folder = tempfile::tempdir().unwrap();
        let addresses = free_addresses(LOOPBACK, 2).unwrap().ranks;
        let hosts = Hosts::write(folder.path(), &addresses).unwrap();
        let mut command = Command::new("none");
        set(&mut command, Over::Ring, 1, 1, &addresses, &hosts).unwrap();
        let file = hosts.0.clone();
        let read: Vec<Vec<String>> = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(read.concat(), addresses);
        let set: Vec<_> = command.get_envs().collect();
        assert!(set.contains(&(RANK.as_ref(), Some("1".as_ref()))), "{set:?}");
        drop(hosts);
        assert!(!file.exists());
    }
}
