//! TLS to a server whose certificate nobody judges: it is asked whether it serves, not who it is.

use std::{net::IpAddr, sync::Arc, sync::LazyLock};

use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        crypto::ring,
        pki_types::{CertificateDer, ServerName, UnixTime},
    },
};

static CONFIG: LazyLock<Result<Arc<ClientConfig>, Error>> = LazyLock::new(|| {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody))
        .with_no_client_auth();
    Ok(Arc::new(config))
});

/// Shakes hands with the server called `host`, which may have a port.
pub(super) async fn connect(stream: TcpStream, host: &str) -> Result<TlsStream<TcpStream>, String> {
    let config = CONFIG.as_ref().map_err(|error| format!("TLS: {error}"))?;
    let name = server_name(host).ok_or_else(|| format!("TLS: {host} is no name of a server"))?;
    let connected = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
    connected.map_err(|error| format!("TLS: {}", super::said(&error)))
}

fn server_name(host: &str) -> Option<ServerName<'static>> {
    let name = match host.rsplit_once(':') {
        // An IPv6 address with a port stands in brackets.
        Some((name, _port)) if !name.contains(':') || name.ends_with(']') => name,
        _ => host,
    };
    let name = name.trim_matches(['[', ']']);
    match name.parse::<IpAddr>() {
        Ok(address) => Some(address.into()),
        Err(_) => ServerName::try_from(name.to_owned()).ok(),
    }
}

/// Takes every certificate and every signature.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whom_a_host_names() {
        for (host, expected) in [
            ("www.example.com", Some("www.example.com")),
            ("www.example.com:8443", Some("www.example.com")),
            ("10.0.0.1:443", Some("10.0.0.1")),
            ("[2001:db8::1]:443", Some("2001:db8::1")),
            ("2001:db8::1", Some("2001:db8::1")),
            ("-", None),
        ] {
            assert_eq!(
                server_name(host).map(|name| name.to_str().into_owned()).as_deref(),
                expected,
                "{host}"
            );
        }
    }
}
