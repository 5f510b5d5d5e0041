//! Open connections: a limit on all of them, and one on those of an address.
//!
//! A connection waits for its client (for the head or the body of a request), or the server works for
//! it. When a limit is reached, a new connection displaces the one that has waited longest, so clients
//! that open connections and send nothing cannot keep others out. If the server works for all of
//! them, the new one is refused.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;

use crate::config::ServerConfig;
use crate::throttle::Throttle;

/// Most connections if the configuration sets no number.
const CONNECTIONS: usize = 4096;

/// Limit on open files that is assumed where the system names none.
const OPEN_FILES: usize = 1024;

/// Open files that the process asks for: enough for [`CONNECTIONS`], models, the store and downloads. macOS allows 256
/// by default, and at most this many without a change of its kernel's limits (`OPEN_MAX`).
const WANTED_FILES: u64 = 10_240;

/// Displaced connections that may be open beyond the limit, and how long to wait for their end.
const CLOSING: usize = 16;
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// Bits of an IPv6 address that identify a network: a client can use all addresses of its own.
const NETWORK_BITS: u32 = 64;

/// All open connections, and how many were not kept.
pub struct Connections {
    limit: usize,
    limit_per_address: usize,
    open: Mutex<Open>,
    full: Throttle,
    /// Counts since the start.
    pub counts: Counts,
}

/// Connections that were closed or refused, since the start.
#[derive(Default)]
pub struct Counts {
    /// Refused because the server works for all connections.
    pub refused: Counter,
    /// Closed for a new connection.
    pub displaced: Counter,
    /// Closed because no request head arrived in time.
    pub timed_out: Counter,
}

#[derive(Default)]
struct Open {
    next_id: u64,
    by_id: BTreeMap<u64, Entry>,
    /// Displaced connections that are not closed yet.
    closing: usize,
}

struct Entry {
    address: IpAddr,
    /// Whether the connection waits for its client; otherwise the server works for it.
    waits: bool,
    since: Instant,
    displaced: Arc<Notify>,
}

/// One open connection; dropping it makes room for another.
pub struct Connection {
    /// The client's address, or that of the proxy before it.
    pub address: IpAddr,
    id: u64,
    displaced: Arc<Notify>,
    all: Arc<Connections>,
}

impl Connections {
    /// The limits of `config`, within the limit on open files.
    pub fn new(config: &ServerConfig) -> Self {
        // The rest is for models, the store and downloads.
        let allowed = open_files() / 4 * 3;
        let limit = match config.max_connections {
            0 => allowed.min(CONNECTIONS),
            wanted if wanted > allowed => {
                tracing::warn!(
                    wanted,
                    limit = allowed,
                    "server.max_connections lowered: raise the limit on open files (ulimit -n)"
                );
                allowed
            }
            wanted => wanted,
        };
        let limit_per_address = match config.max_connections_per_address {
            0 => (limit / 2).max(1),
            wanted => wanted,
        };
        let (full, counts) = (Throttle::default(), Counts::default());
        Self { limit, limit_per_address, open: Mutex::default(), full, counts }
    }

    /// Adds a connection from `address`; `None` if a limit is reached and the server works for all
    /// connections that it could displace.
    ///
    /// The limit per address does not apply to this machine, whose users share one address.
    pub fn add(self: &Arc<Self>, address: IpAddr) -> Option<Connection> {
        let (client, address) = (address, network(address));
        let mut open = self.open();
        let of_address = open.by_id.values().filter(|entry| entry.address == address).count();
        let address_full = !address.is_loopback() && of_address >= self.limit_per_address;
        if address_full || open.by_id.len() >= self.limit {
            let displaced = open.displace_longest(address_full.then_some(address));
            if let Some(suppressed) = self.full.pass() {
                let (open, refused) = (open.by_id.len(), !displaced);
                tracing::warn!(%address, open, refused, suppressed, "too many connections");
            }
            if !displaced {
                self.counts.refused.inc();
                return None;
            }
            self.counts.displaced.inc();
        }
        let (id, displaced) = (open.next_id, Arc::new(Notify::new()));
        open.next_id += 1;
        let entry =
            Entry { address, waits: true, since: Instant::now(), displaced: displaced.clone() };
        open.by_id.insert(id, entry);
        Some(Connection { address: client, id, displaced, all: self.clone() })
    }

    /// Closes the connection that has waited longest for its client; false if none waits.
    pub fn displace(&self) -> bool {
        let displaced = self.open().displace_longest(None);
        if displaced {
            self.counts.displaced.inc();
        }
        displaced
    }

    /// Number of open connections.
    pub fn count(&self) -> usize {
        self.open().by_id.len()
    }

    /// Waits until displaced connections are closed, but for a few.
    pub async fn close_displaced(&self) {
        while self.open().closing > CLOSING {
            tokio::time::sleep(CLOSE_PAUSE).await;
        }
    }

    /// Most open connections.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Most open connections from one address.
    pub fn limit_per_address(&self) -> usize {
        self.limit_per_address
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock()
    }
}

impl Open {
    /// Closes the connection that has waited longest, among those from `address` if it is given.
    fn displace_longest(&mut self, address: Option<IpAddr>) -> bool {
        let of_address = |entry: &Entry| address.is_none_or(|address| address == entry.address);
        let waiting = self.by_id.iter().filter(|(_, entry)| entry.waits && of_address(entry));
        let longest = waiting.map(|(id, entry)| (entry.since, *id)).min();
        let entry = longest.and_then(|(_, id)| self.by_id.remove(&id));
        self.closing += usize::from(entry.is_some());
        entry.inspect(|entry| entry.displaced.notify_one()).is_some()
    }
}

impl Connection {
    /// The client has sent its request: the connection is not displaced until [`Self::waits`].
    pub fn works(&self) {
        self.set(false);
    }

    /// The connection waits for its client.
    pub fn waits(&self) {
        self.set(true);
    }

    /// Waits until the connection has to close for another one.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }

    /// All connections of the server.
    pub fn all(&self) -> &Connections {
        &self.all
    }

    /// Waits until the server has worked for one request for longer than `limit`.
    pub async fn works_longer_than(&self, limit: Duration) {
        loop {
            let entry = self.all.open().by_id.get(&self.id).map(|entry| (entry.waits, entry.since));
            let left = match entry {
                Some((false, since)) => limit.saturating_sub(since.elapsed()),
                _ => limit,
            };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    fn set(&self, waits: bool) {
        if let Some(entry) = self.all.open().by_id.get_mut(&self.id) {
            (entry.waits, entry.since) = (waits, Instant::now());
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut open = self.all.open();
        if open.by_id.remove(&self.id).is_none() {
            open.closing -= 1;
        }
    }
}

/// What counts as one address: an IPv4 address, or a network of IPv6.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let mask = u128::MAX << (Ipv6Addr::BITS - NETWORK_BITS);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
        address => address,
    }
}

/// The number of files that this process may open, after its soft limit was raised to [`WANTED_FILES`] as far as the
/// hard limit allows. A limit that is higher already is kept.
pub fn open_files() -> usize {
    #[cfg(unix)]
    {
        use rlimit::{Resource, getrlimit, increase_nofile_limit};
        // Fails where the system has a limit besides the hard one: then the soft limit counts.
        let raised = increase_nofile_limit(WANTED_FILES);
        if let Ok(files) = raised.or_else(|_| getrlimit(Resource::NOFILE).map(|(soft, _)| soft)) {
            return usize::try_from(files).unwrap_or(usize::MAX);
        }
    }
    OPEN_FILES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(max_connections: usize, max_connections_per_address: usize) -> Arc<Connections> {
        let config = ServerConfig {
            max_connections,
            max_connections_per_address,
            ..ServerConfig::default()
        };
        Arc::new(Connections::new(&config))
    }

    fn is_displaced(connection: &Connection) -> bool {
        !connection.all.open().by_id.contains_key(&connection.id)
    }

    #[test]
    fn the_connection_that_waited_longest_is_displaced() {
        let all = connections(3, 3);
        let here = IpAddr::from([127, 0, 0, 1]);
        let add = || all.add(here).unwrap();
        let (first, second, third) = (add(), add(), add());
        first.works();
        second.works();
        second.waits();
        let fourth = add();
        assert_eq!(
            [&first, &second, &third, &fourth].map(is_displaced),
            [false, false, true, false]
        );
        fourth.works();
        let fifth = add();
        assert!(is_displaced(&second));
        fifth.works();
        assert!(all.add(here).is_none(), "the server works for all of them");
        drop(fifth);
        assert!(all.add(here).is_some(), "a closed connection makes room");
        assert_eq!((all.counts.displaced.get(), all.counts.refused.get()), (2, 1));
    }

    #[test]
    fn an_address_at_its_limit_displaces_its_own_connections_only() {
        let all = connections(4, 2);
        let add = |text: &str| all.add(text.parse().unwrap());
        let other = add("10.0.0.9").unwrap();
        let (first, second) = (add("10.0.0.1").unwrap(), add("10.0.0.1").unwrap());
        let third = add("10.0.0.1").unwrap();
        assert_eq!([&other, &first, &second].map(is_displaced), [false, true, false]);
        second.works();
        third.works();
        assert!(add("10.0.0.1").is_none());
        assert!(add("::ffff:10.0.0.1").is_none(), "the same address, mapped");
        assert_eq!(all.count(), 3);
    }

    /// macOS starts programs with 256 open files, of which 192 were for connections.
    #[cfg(unix)]
    #[test]
    fn the_limit_on_open_files_is_raised_as_far_as_the_system_allows() {
        use rlimit::{Resource, getrlimit, setrlimit};
        let (before, hard) = getrlimit(Resource::NOFILE).unwrap();
        setrlimit(Resource::NOFILE, before.min(256), hard).unwrap();
        let files = open_files() as u64;
        assert_eq!(files, WANTED_FILES.min(hard).max(before.min(256)));
        assert_eq!(getrlimit(Resource::NOFILE).unwrap(), (files, hard));
        if hard >= WANTED_FILES {
            assert_eq!(connections(0, 0).limit(), CONNECTIONS);
        }
        // A limit that is higher already is kept.
        setrlimit(Resource::NOFILE, before, hard).unwrap();
        assert_eq!(open_files() as u64, before.max(files));
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address_and_this_machine_has_no_limit() {
        let all = connections(9, 1);
        let add = |text: &str| all.add(text.parse().unwrap());
        let first = add("2001:db8::1").unwrap();
        let _second = add("2001:db8::ffff:2").unwrap();
        assert!(is_displaced(&first));
        let local: Vec<_> = ["127.0.0.1", "127.0.0.1", "::1", "::1"].map(add).into();
        assert!(local.iter().flatten().all(|connection| !is_displaced(connection)));
        assert_eq!(all.count(), 5);
    }
}
