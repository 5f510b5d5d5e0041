//! The one-time link by which the owner of a server for this machine becomes its operator.
//!
//! A server without keys that listens on this machine only has no operator: its console would show
//! numbers and change nothing. `serve` prints a link on its terminal, and who has read it opens the
//! console. The token of the link is in the fragment of its address, which browsers send to no
//! server. The console exchanges it for a key, once; both end with the process and are in no file.

use std::fmt;
use std::io::IsTerminal;
use std::net::SocketAddr;

use anyhow::{Result, anyhow};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::ServerConfig;
use crate::keys::KeyDigest;

/// Random bytes of a token and of a key.
const BYTES: usize = 32;

/// Begins the key, which is none of `steersman keys`.
const PREFIX: &str = "sk-session-";

/// A link that was printed.
pub struct Link(Mutex<State>);

enum State {
    /// Nobody has used the link.
    Offered { token: KeyDigest, key: SecretString },
    /// The link was used; the key has this digest.
    Used(KeyDigest),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    /// A link, and its token.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn new() -> Result<(Self, String)> {
        let (token, key) = (random()?, format!("{PREFIX}{}", random()?));
        let state = State::Offered { token: digest(&token), key: key.into() };
        Ok((Self(Mutex::new(state)), token))
    }

    /// The operator's key for the token of the link; `None` if it is another token, or the link was
    /// used.
    pub fn exchange(&self, token: &str) -> Option<String> {
        let mut state = self.0.lock();
        let State::Offered { token: expected, key } = &*state else { return None };
        if !bool::from(expected.ct_eq(&digest(token))) {
            return None;
        }
        let key = key.expose_secret().to_string();
        *state = State::Used(digest(&key));
        Some(key)
    }

    /// Whether a key with this digest is the one that the link was exchanged for. Takes the same
    /// time for every key.
    pub fn opens(&self, key: &KeyDigest) -> bool {
        match &*self.0.lock() {
            State::Offered { .. } => false,
            State::Used(expected) => expected.ct_eq(key).into(),
        }
    }
}

/// A link and the address to print, if the server has no keys, only this machine reaches it, and a
/// terminal shows the address to its owner alone: it is printed to no file and to no journal.
/// `has_created_keys` are those of `steersman keys`.
///
/// # Errors
/// If the system has no randomness.
pub fn offer(
    address: SocketAddr,
    server: &ServerConfig,
    has_created_keys: bool,
) -> Result<Option<(Link, String)>> {
    let is_offered = is_for_owner(address, server, has_created_keys);
    if !is_offered || !std::io::stdout().is_terminal() {
        return Ok(None);
    }
    let (link, token) = Link::new()?;
    Ok(Some((link, console_url(address, &token))))
}

/// Whether a server has no keys, and only this machine reaches it.
fn is_for_owner(address: SocketAddr, server: &ServerConfig, has_created_keys: bool) -> bool {
    let has_keys = has_created_keys || !server.api_keys.is_empty() || !server.admin_keys.is_empty();
    address.ip().is_loopback() && !has_keys
}

/// The address of the console of the server at `address` with this token.
fn console_url(address: SocketAddr, token: &str) -> String {
    format!("http://{address}/#/enter/{token}")
}

fn digest(text: &str) -> KeyDigest {
    Sha256::digest(text).into()
}

fn random() -> Result<String> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("no randomness: {error}"))?;
    Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_exchanged_once() {
        let (link, token) = Link::new().unwrap();
        assert!(!link.opens(&digest(&token)), "the token is no key");
        assert_eq!(link.exchange(""), None);
        assert_eq!(link.exchange(&token[1..]), None);
        let key = link.exchange(&token).unwrap();
        assert!(link.opens(&digest(&key)));
        assert!(!link.opens(&digest("sk-session-")));
        assert_eq!(link.exchange(&token), None);
        assert!(link.opens(&digest(&key)), "another try changes nothing");
        let (other, _) = Link::new().unwrap();
        assert!(!other.opens(&digest(&key)), "it ends with the process");
    }

    #[test]
    fn a_link_is_for_a_server_of_this_machine_without_keys() {
        let is_offered = |address: &str, config: &ServerConfig| {
            is_for_owner(address.parse().unwrap(), config, false)
        };
        let open = ServerConfig::default();
        assert!(is_offered("127.0.0.1:1", &open));
        assert!(is_offered("[::1]:1", &open));
        assert!(!is_offered("192.168.0.2:1", &open));
        assert!(!is_offered("0.0.0.0:1", &open));
        let address = "127.0.0.1:1".parse().unwrap();
        assert!(!is_for_owner(address, &open, true));
        let keys = || vec!["sk-a".to_string().into()];
        let api = ServerConfig { api_keys: keys(), ..ServerConfig::default() };
        let admin = ServerConfig { admin_keys: keys(), ..ServerConfig::default() };
        assert!(!is_offered("127.0.0.1:1", &api) && !is_offered("127.0.0.1:1", &admin));
        assert!(offer(address, &api, false).unwrap().is_none());
    }

    #[test]
    fn nothing_prints_a_token() {
        let (link, token) = Link::new().unwrap();
        assert!(!format!("{link:?}").contains(&token));
        let address = "127.0.0.1:7".parse().unwrap();
        assert_eq!(console_url(address, "abc"), "http://127.0.0.1:7/#/enter/abc");
    }
}
